"""Typed configuration, read from what a request carries."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from loss_hub import DatumInputs, InputError, check
from loss_hub.config import check_config_type, parse_config
from loss_hub.losses.cispo import CispoConfig
from loss_hub.losses.dro import DroConfig
from loss_hub.losses.ppo import PpoConfig


def refusal(loss_name: str, config: dict[str, float | str]) -> InputError:
    inputs = {"target_tokens": torch.tensor([1])}
    if loss_name != "cross_entropy":
        inputs |= {"logprobs": torch.tensor([-1.0]), "advantages": torch.tensor([1.0])}
    with pytest.raises(InputError) as caught:
        check(loss_name, config, [DatumInputs(1, inputs)])
    return caught.value


def test_defaults_are_the_documented_ones() -> None:
    assert PpoConfig() == PpoConfig(clip_low_threshold=0.8, clip_high_threshold=1.2)
    assert CispoConfig() == CispoConfig(clip_low_threshold=0.0, clip_high_threshold=4.0)
    assert DroConfig().beta == 0.05


def test_keys_left_out_keep_their_default() -> None:
    assert parse_config(PpoConfig, {"clip_high_threshold": 2}) == PpoConfig(0.8, 2.0)


def test_an_unknown_key_is_refused_by_name_with_the_known_ones() -> None:
    error = refusal("ppo", {"clip_epsilon": 0.2})
    assert error.field == "loss.config.clip_epsilon"
    assert "clip_low_threshold, clip_high_threshold" in str(error)
    none = refusal("cross_entropy", {"beta": 1.0})
    assert none.field == "loss.config.beta"
    assert "this loss has none" in str(none)


def test_text_where_a_number_is_needed_is_refused() -> None:
    error = refusal("dro", {"beta": "high"})
    assert error.field == "loss.config.beta"
    assert "'high'" in str(error)
    assert "number" in str(error)
    assert refusal("dro", {"beta": True}).field == "loss.config.beta"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused(value) -> None:
    error = refusal("ppo", {"clip_high_threshold": value})
    assert error.field == "loss.config.clip_high_threshold"
    assert str(value) in str(error)


def test_a_low_threshold_above_the_high_one_is_refused_with_both() -> None:
    error = refusal("cispo", {"clip_low_threshold": 1.3, "clip_high_threshold": 1.2})
    assert error.field == "loss.config.clip_low_threshold"
    assert "1.3" in str(error)
    assert "1.2" in str(error)
    against_default = refusal("ppo", {"clip_low_threshold": 1.5})
    assert "1.2" in str(against_default)


@dataclass(frozen=True)
class Mixed:
    steps: int = 1
    mode: str = "mean"


def test_whole_numbers_and_texts_are_read_too() -> None:
    assert parse_config(Mixed, {"steps": 3.0, "mode": "max"}) == Mixed(3, "max")
    with pytest.raises(InputError, match=r"loss\.config\.steps.*whole.*2\.5"):
        parse_config(Mixed, {"steps": 2.5})
    with pytest.raises(InputError, match=r"loss\.config\.mode.*text.*1"):
        parse_config(Mixed, {"mode": 1.0})


def test_a_config_class_no_request_could_fill_is_refused_at_registration() -> None:
    @dataclass(frozen=True)
    class Nested:
        inner: dict = None  # type: ignore[type-arg, assignment]

    @dataclass(frozen=True)
    class WithoutDefault:
        beta: float

    with pytest.raises(TypeError, match=r"Nested\.inner"):
        check_config_type(Nested)
    with pytest.raises(TypeError, match="beta"):
        check_config_type(WithoutDefault)
    with pytest.raises(TypeError, match="dataclass"):
        check_config_type(int)
