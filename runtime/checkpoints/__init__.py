"""Checkpoints: saved weights under a name, in a folder that nobody changes once its row stands in the table."""
