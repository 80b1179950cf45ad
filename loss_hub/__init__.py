"""Losses as small pure functions of target logprobs, chosen per request.

What is listed here is the public face; the rest may change.
"""

import loss_hub.losses  # noqa: F401 -- registers the built-in ones
from loss_hub.batch import BatchInputs
from loss_hub.errors import InputError, UnknownLoss
from loss_hub.inputs import CheckedRequest, DatumInputs, check
from loss_hub.registry import get, loss, names
from loss_hub.terms import Evaluation, evaluate, merge

__all__ = [
    "BatchInputs",
    "CheckedRequest",
    "DatumInputs",
    "Evaluation",
    "InputError",
    "UnknownLoss",
    "check",
    "evaluate",
    "get",
    "loss",
    "merge",
    "names",
]
