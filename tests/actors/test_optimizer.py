"""AdamParams act on their step alone, and as torch's AdamW acts on them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch

from bus.events import AdamParams
from tests.support import dumps
from tests.support.adamw import TorchAdamW, difference
from tests.support.models import Model, assert_same_bits
from tests.support.requests import random_request

NewModel = Callable[..., Model]
LENGTHS = (7, 3, 11)
USUAL = AdamParams(learning_rate=1e-3, eps=1e-8)
CHANGES: dict[str, dict[str, float]] = {
    "learning_rate": {"learning_rate": 3e-3},
    "beta1": {"beta1": 0.5},
    "beta2": {"beta2": 0.7},
    "eps": {"eps": 1.0},
    "weight_decay": {"weight_decay": 0.3},
    "grad_clip_norm": {"grad_clip_norm": 0.25},
}


def test_every_hyperparameter_has_a_probe() -> None:
    assert CHANGES.keys() == {field.name for field in msgspec.structs.fields(AdamParams)}


@pytest.mark.parametrize("field", CHANGES)
def test_each_hyperparameter_acts_on_its_step_and_only_on_it(small_model: NewModel, field: str) -> None:
    """Usual, changed, usual: torch's AdamW, told the same on our gradients, stays on our weights.

    The change comes second, for after the first step of Adam no weight shows how large a gradient was.
    """
    model = small_model(b_seed=1)
    told, untold = TorchAdamW(model.weights()), TorchAdamW(model.weights())
    changed = msgspec.structs.replace(USUAL, **CHANGES[field])
    for number, adam in enumerate((USUAL, changed, USUAL)):
        model.call(random_request(LENGTHS, seed=number))
        found = model.step(adam)
        assert difference(told.step(found.gradient, adam), found.after) <= 1e-9
        assert difference(told.moment("exp_avg"), found.exp_avg) <= 1e-9
        assert difference(told.moment("exp_avg_sq"), found.exp_avg_sq) <= 1e-9
        without = difference(untold.step(found.gradient, USUAL), found.after)
        assert without <= 1e-9 if number == 0 else without > 1e-5, number


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_a_learning_rate_of_zero_moves_no_bit(small_model: NewModel, weight_decay: float) -> None:
    model = small_model(b_seed=1)
    for number in range(2):
        before = model.weights()
        model.call(random_request(LENGTHS, seed=number))
        found = model.step(learning_rate=0.0, weight_decay=weight_decay)
        assert found.report.grad_norm > 1
        assert_same_bits(found.after, before)


def test_a_clip_norm_of_zero_or_above_the_norm_clips_nothing(small_model: NewModel) -> None:
    found = []
    for clip in (0.0, 1e9):
        model = small_model(b_seed=1)
        for number in range(2):
            model.call(random_request(LENGTHS, seed=number))
            found.append(model.step(USUAL, grad_clip_norm=clip))
    assert_same_bits(found[2].everything(), found[0].everything())
    assert_same_bits(found[3].everything(), found[1].everything())


@pytest.mark.parametrize("clip", [0.0, 0.125, 1e9])
def test_the_reported_norm_is_torchs_of_the_gradient_before_clipping(
    small_model: NewModel, clip: float
) -> None:
    model = small_model(b_seed=1)
    model.call(random_request(LENGTHS))
    found = model.step(USUAL, grad_clip_norm=clip)
    wanted = torch.nn.utils.get_total_norm([t.double() for t in found.gradient.values()])
    assert found.report.grad_norm == pytest.approx(float(wanted), rel=1e-12)
    assert found.report.grad_norm > 1
    # (1 - β1)·g is what the first moment holds of a first gradient, so it shows the clipped one.
    held = float(dumps.vector(found.exp_avg).norm()) / (1 - USUAL.beta1)
    assert held == pytest.approx(clip if clip == 0.125 else float(wanted), rel=1e-4)
