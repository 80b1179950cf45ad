"""Weight transforms: what a forward pass computes with in place of the weights that are stored and trained."""
