"""A loss's typed configuration, read from the mapping of names to numbers or texts that a request carries."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_type_hints

from torch import Tensor

from loss_hub.errors import InputError

_KINDS = (float, int, str)


def config_field(key: str) -> str:
    """The path of one configuration key, as errors name it."""
    return f"loss.config.{key}"


@dataclass(frozen=True, slots=True)
class NoConfig:
    """The configuration of a loss that has none."""


@dataclass(frozen=True)
class RatioBounds:
    """Bounds of the ratio r = exp(lp − q): absolute ratios, not distances from 1."""

    clip_low_threshold: float
    clip_high_threshold: float

    def __post_init__(self) -> None:
        if self.clip_low_threshold > self.clip_high_threshold:
            raise InputError(
                f"{self.clip_low_threshold:g} is above clip_high_threshold {self.clip_high_threshold:g}; "
                "both are absolute ratios, the low one first",
                config_field("clip_low_threshold"),
            )

    def outside(self, ratio_N: Tensor) -> Tensor:
        """bool: where the ratio lies below the low or above the high bound."""
        return (ratio_N < self.clip_low_threshold) | (ratio_N > self.clip_high_threshold)


def check_config_type(config: type) -> None:
    """Refuse, when a loss is registered, a config class that a request could not be read into."""
    if not is_dataclass(config):
        raise TypeError(f"{config.__name__} must be a dataclass")
    hints = get_type_hints(config)
    for field in fields(config):
        if hints[field.name] not in _KINDS:
            raise TypeError(f"{config.__name__}.{field.name} must be a float, an int or a str")
    config()  # every key has a default


def parse_config(config: type, values: Mapping[str, float | str]) -> Any:
    """An instance of the dataclass `config`, keys left out at their defaults.

    Raises InputError for a key it does not have, text where a number is needed and the reverse, a number
    that is not finite, and whatever the class's own `__post_init__` refuses.
    """
    kinds = {field.name: get_type_hints(config)[field.name] for field in fields(config)}
    for key, value in values.items():
        if key not in kinds:
            known = f"known are {', '.join(kinds)}" if kinds else "this loss has none"
            raise InputError(f"unknown configuration key; {known}", config_field(key))
        _check_value(key, value, kinds[key])
    return config(**{key: kinds[key](value) for key, value in values.items()})


def _check_value(key: str, value: float | str, kind: type) -> None:
    if kind is str:
        if not isinstance(value, str):
            raise InputError(f"must be text, got {value!r}", config_field(key))
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"must be a number, got {value!r}", config_field(key))
    if not math.isfinite(value):
        raise InputError(f"must be a finite number, got {value}", config_field(key))
    if kind is int and value != int(value):
        raise InputError(f"must be a whole number, got {value:g}", config_field(key))
