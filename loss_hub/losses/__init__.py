"""One file a loss; importing this package registers them."""

from loss_hub.losses import cispo, cross_entropy, dro, gspo, importance_sampling, ppo

__all__ = ["cispo", "cross_entropy", "dro", "gspo", "importance_sampling", "ppo"]
