"""Losses by name: how one is declared, and how a request finds it.

A loss is a pure function `(logprobs, batch, config) -> LossTerms` over the flat tokens of one microbatch. It
is a sum: no mean, no clamp, no mask unless its definition says so. Losses that other packages bring are found at the
first question for a name; see `loss_hub.plugins`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loss_hub.batch import BatchInputs
from loss_hub.config import NoConfig, check_config_type
from loss_hub.errors import UnknownLoss
from loss_hub.plugins import Plugins
from loss_hub.specs import ADVANTAGES, TARGETS, WEIGHTS, InputSpec


@dataclass(frozen=True, slots=True)
class LossTerms:
    """What a loss function returns."""

    per_token: Tensor
    """One term a target, shaped like the logprobs; the loss is their sum."""
    clipped_N: Tensor | None = None
    """bool: where the ratio lies outside the configured bounds; None for a loss that has none."""


LossFunction = Callable[[Tensor, BatchInputs, Any], LossTerms]
Selection = Callable[[BatchInputs], Tensor]


@dataclass(frozen=True)
class Loss:
    """A registered loss. Pickles as its name, so that every process uses its own registration."""

    name: str
    inputs: tuple[InputSpec, ...]
    config: type
    """The dataclass of its configuration, every key with a default."""
    function: LossFunction
    takes_part: Selection
    """Which targets count: bool, shaped like them. The function never sees the others' logprobs."""

    def __reduce__(self) -> tuple[Callable[[str], Loss], tuple[str]]:
        return get, (self.name,)

    def input(self, name: str) -> InputSpec | None:
        """The declared input of this name, or None."""
        return next((spec for spec in self.inputs if spec.name == name), None)


_LOSSES: dict[str, Loss] = {}
_PLUGINS = Plugins()


def loss(
    name: str,
    *,
    inputs: tuple[InputSpec, ...],
    config: type = NoConfig,
    takes_part: Selection | None = None,
) -> Callable[[LossFunction], LossFunction]:
    """Register the decorated function as the loss `name`.

    `takes_part` defaults to the targets with a weight, the positions with an advantage, or all, by what the
    loss takes as input. The function gets float inputs and logprobs with 0 where a target takes no part, and
    its terms there are dropped. Raises ValueError when the name is taken, TypeError for an unusable config.
    """
    if name in _LOSSES:
        there = _LOSSES[name].function
        raise ValueError(
            f"a loss named {name!r} is registered already: {there.__module__}.{there.__qualname__}"
        )
    if TARGETS.name not in {spec.name for spec in inputs}:
        raise ValueError(f"the loss {name!r} must take {TARGETS.name}")
    check_config_type(config)

    def register(function: LossFunction) -> LossFunction:
        _LOSSES[name] = Loss(name, inputs, config, function, takes_part or _selection_by(inputs))
        return function

    return register


def get(name: str) -> Loss:
    """The loss of this name. Raises UnknownLoss, which lists the known ones."""
    _PLUGINS.into(_LOSSES)
    try:
        return _LOSSES[name]
    except KeyError:
        raise UnknownLoss(name, names()) from None


def names() -> tuple[str, ...]:
    """Every registered name, those of plug-ins too, in alphabetical order."""
    _PLUGINS.into(_LOSSES)
    return tuple(sorted(_LOSSES))


def left_out() -> tuple[str, ...]:
    """Plug-ins that cannot be used, one sentence each that says why."""
    return _PLUGINS.into(_LOSSES)


def _selection_by(inputs: tuple[InputSpec, ...]) -> Selection:
    given = {spec.name for spec in inputs}
    if WEIGHTS.name in given:
        return BatchInputs.weighted
    if ADVANTAGES.name in given:
        return BatchInputs.advantaged_N
    return lambda batch: torch.ones_like(batch.targets_N, dtype=torch.bool)
