"""Losses as small pure functions of target logprobs, chosen per request.

What is listed here is the public face; the rest may change.
"""

import loss_hub.losses  # noqa: F401 -- registers the built-in ones
from loss_hub.batch import BatchInputs
from loss_hub.config import NoConfig
from loss_hub.errors import InputError, UnknownLoss
from loss_hub.inputs import CheckedRequest, DatumInputs, check
from loss_hub.registry import LossTerms, get, left_out, loss, names
from loss_hub.specs import ADVANTAGES, ROLLOUT_LOGPROBS, TARGETS, TOP_K_TARGETS, WEIGHTS, InputSpec
from loss_hub.terms import Evaluation, evaluate, merge

__all__ = [
    "ADVANTAGES",
    "ROLLOUT_LOGPROBS",
    "TARGETS",
    "TOP_K_TARGETS",
    "WEIGHTS",
    "BatchInputs",
    "CheckedRequest",
    "DatumInputs",
    "Evaluation",
    "InputError",
    "InputSpec",
    "LossTerms",
    "NoConfig",
    "UnknownLoss",
    "check",
    "evaluate",
    "get",
    "left_out",
    "loss",
    "merge",
    "names",
]
