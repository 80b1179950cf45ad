"""AdamParams act on their step alone and as in torch; non-finite gradients veto the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from bus.events import AdamParams
from tests.support import dumps
from tests.support.adamw import TorchAdamW, difference
from tests.support.models import Model, Step
from tests.support.requests import datums, packed, random_request

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


def step(model: Model, adam: AdamParams) -> Step:
    return model.step(**msgspec.structs.asdict(adam))


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert torch.equal(found[name], values), name


# ------------------------------------------------------------------------------------------ hyperparameters


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
        found = step(model, adam)
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
        found = step(model, AdamParams(learning_rate=0.0, weight_decay=weight_decay))
        assert found.report.grad_norm > 1
        assert_same(found.after, before)


def test_a_clip_norm_of_zero_or_above_the_norm_clips_nothing(small_model: NewModel) -> None:
    found = []
    for clip in (0.0, 1e9):
        model = small_model(b_seed=1)
        for number in range(2):
            model.call(random_request(LENGTHS, seed=number))
            found.append(step(model, msgspec.structs.replace(USUAL, grad_clip_norm=clip)))
    assert_same(found[2].everything(), found[0].everything())
    assert_same(found[3].everything(), found[1].everything())


@pytest.mark.parametrize("clip", [0.0, 0.125, 1e9])
def test_the_reported_norm_is_torchs_of_the_gradient_before_clipping(
    small_model: NewModel, clip: float
) -> None:
    model = small_model(b_seed=1)
    model.call(random_request(LENGTHS))
    found = step(model, msgspec.structs.replace(USUAL, grad_clip_norm=clip))
    wanted = torch.nn.utils.get_total_norm([t.double() for t in found.gradient.values()])
    assert found.report.grad_norm == pytest.approx(float(wanted), rel=1e-12)
    assert found.report.grad_norm > 1
    # (1 - β1)·g is what the first moment holds of a first gradient, so it shows the clipped one.
    held = float(dumps.vector(found.exp_avg).norm()) / (1 - USUAL.beta1)
    assert held == pytest.approx(clip if clip == 0.125 else float(wanted), rel=1e-4)


# -------------------------------------------------------------------------------------------------- windows


def test_an_empty_window_is_a_zero_gradient_to_a_fresh_model(small_model: NewModel) -> None:
    model = small_model()
    before = model.weights()
    found = step(model, AdamParams(learning_rate=0.5, weight_decay=0.1))
    report = found.report
    assert (report.grad_norm, report.skipped, report.step) == (0.0, False, 1)
    assert (report.window_calls, report.window_tokens, report.finalizations) == (0, 0, 1)
    for name, values in before.items():  # no momentum yet: decay alone
        torch.testing.assert_close(found.after[name], values * (1 - 0.5 * 0.1), rtol=1e-6, atol=0)


def test_an_empty_window_after_a_step_lets_momentum_and_decay_act_as_torch_does(
    small_model: NewModel,
) -> None:
    model = small_model(b_seed=1)
    torchs = TorchAdamW(model.weights())
    adam = msgspec.structs.replace(USUAL, weight_decay=0.1)
    model.call(random_request(LENGTHS))
    first = step(model, adam)
    torchs.step(first.gradient, adam)
    second = step(model, adam)
    assert second.report.grad_norm == 0.0
    assert all((values == 0).all() for values in second.gradient.values())
    zero = {name: torch.zeros_like(values) for name, values in first.gradient.items()}
    assert difference(torchs.step(zero, adam), second.after) <= 1e-9
    assert difference(second.after, first.after) > 1e-4


def test_everything_is_zero_after_a_step_and_nothing_before_it_is(small_model: NewModel) -> None:
    model = small_model(b_seed=1)
    model.call(random_request(LENGTHS))
    assert all(gradients.norm() > 1 for gradients in model.window())
    step(model, USUAL)
    assert all((gradients == 0).all() for gradients in model.window())
    window = model.tenant.window
    assert (window.calls, window.microbatches, window.tokens) == (0, 0, 0)
    for parameter in model.tenant.adapters.parameters():
        assert parameter.grad is None or (parameter.grad == 0).all()
        assert (parameter.main_grad == 0).all()


def test_the_same_call_gives_the_same_gradient_in_every_window(small_model: NewModel) -> None:
    """Nothing of a window is left in the next one, nor is anything zeroed on entry to a call."""
    model = small_model(b_seed=1)
    still = msgspec.structs.replace(USUAL, learning_rate=0.0)
    gradients = []
    for calls in (1, 1, 2):
        for _ in range(calls):
            model.call(random_request(LENGTHS))
        gradients.append(step(model, still).gradient)
    assert_same(gradients[1], gradients[0])
    assert_same(gradients[2], {name: 2 * values for name, values in gradients[0].items()})


# ----------------------------------------------------------------------------------------------------- veto


def overflow(model: Model) -> None:
    """A call that is in order, but whose gradient is beyond float32."""
    tokens, inputs = datums((60, 60), seed=3, weight=3e37)
    metrics = model.call(packed(tokens, inputs)).metrics
    assert math.isfinite(metrics["loss:sum"])


def test_a_non_finite_gradient_vetoes_the_step(small_model: NewModel) -> None:
    model = small_model(b_seed=1)
    model.call(random_request(LENGTHS))
    first = step(model, USUAL)

    model.call(random_request(LENGTHS, seed=1))
    overflow(model)
    skipped = step(model, msgspec.structs.replace(USUAL, grad_clip_norm=1.0, weight_decay=0.1))
    report = skipped.report
    assert report.skipped
    assert not math.isfinite(report.grad_norm)
    assert (report.step, report.window_calls, report.finalizations) == (2, 2, 1)
    for kind in ("after", "exp_avg", "exp_avg_sq"):
        assert_same(getattr(skipped, kind), getattr(first, kind))
    assert all((gradients == 0).all() for gradients in model.window())
    assert model.tenant.window.calls == 0


def test_after_a_veto_the_model_goes_on_as_if_the_window_had_never_been(small_model: NewModel) -> None:
    def last_step(*, interrupted: bool) -> dict[str, torch.Tensor]:
        model = small_model(b_seed=1)
        model.call(random_request(LENGTHS))
        step(model, USUAL)
        if interrupted:
            overflow(model)
            assert step(model, USUAL).report.skipped
        model.call(random_request(LENGTHS, seed=2))
        found = step(model, USUAL)
        assert not found.report.skipped
        return found.everything()

    assert_same(last_step(interrupted=True), last_step(interrupted=False))


def test_a_veto_of_the_very_first_step_leaves_a_fresh_model(small_model: NewModel) -> None:
    model = small_model(b_seed=1)
    before = model.weights()
    overflow(model)
    found = step(model, USUAL)
    assert found.report.skipped
    assert_same(found.after, before)
    assert all((values == 0).all() for values in (found.exp_avg | found.exp_avg_sq).values())


def test_a_gradient_large_but_finite_is_no_reason_to_skip(small_model: NewModel) -> None:
    """Its float32 square is not finite; the norm is added up in float64."""
    model = small_model(b_seed=1)
    tokens, inputs = datums(LENGTHS, weight=1e25)
    model.call(packed(tokens, inputs))
    found: Any = step(model, msgspec.structs.replace(USUAL, grad_clip_norm=1.0))
    assert not found.report.skipped
    assert 1e20 < found.report.grad_norm < 1e35
    held = float(dumps.vector(found.exp_avg).norm()) / (1 - USUAL.beta1)
    assert held == pytest.approx(1.0, rel=1e-4)
