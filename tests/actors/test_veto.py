"""A gradient that is not finite vetoes the step, and the model goes on as if the window had never been."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from bus.events import AdamParams
from tests.support import dumps
from tests.support.models import Model, assert_same_bits
from tests.support.requests import datums, packed, random_request

NewModel = Callable[..., Model]
LENGTHS = (7, 3, 11)
USUAL = AdamParams(learning_rate=1e-3, eps=1e-8)


def overflow(model: Model) -> None:
    """A call that is in order, but whose gradient is beyond float32."""
    tokens, inputs = datums((60, 60), seed=3, weight=3e37)
    metrics = model.call(packed(tokens, inputs)).metrics
    assert math.isfinite(metrics["loss:sum"])


def test_a_non_finite_gradient_vetoes_the_step(small_model: NewModel) -> None:
    model = small_model(b_seed=1)
    model.call(random_request(LENGTHS))
    first = model.step(USUAL)

    model.call(random_request(LENGTHS, seed=1))
    overflow(model)
    skipped = model.step(USUAL, grad_clip_norm=1.0, weight_decay=0.1)
    report = skipped.report
    assert report.skipped
    assert not math.isfinite(report.grad_norm)
    assert (report.step, report.window_calls, report.finalizations) == (2, 2, 1)
    for kind in ("after", "exp_avg", "exp_avg_sq"):
        assert_same_bits(getattr(skipped, kind), getattr(first, kind))
    assert all((gradients == 0).all() for gradients in model.window())
    assert model.tenant.window.calls == 0


def test_after_a_veto_the_model_goes_on_as_if_the_window_had_never_been(small_model: NewModel) -> None:
    def last_step(*, interrupted: bool) -> dict[str, torch.Tensor]:
        model = small_model(b_seed=1)
        model.call(random_request(LENGTHS))
        model.step(USUAL)
        if interrupted:
            overflow(model)
            assert model.step(USUAL).report.skipped
        model.call(random_request(LENGTHS, seed=2))
        found = model.step(USUAL)
        assert not found.report.skipped
        return found.everything()

    assert_same_bits(last_step(interrupted=True), last_step(interrupted=False))


def test_a_veto_of_the_very_first_step_leaves_a_fresh_model(small_model: NewModel) -> None:
    model = small_model(b_seed=1)
    before = model.weights()
    overflow(model)
    found = model.step(USUAL)
    assert found.report.skipped
    assert_same_bits(found.after, before)
    assert all((values == 0).all() for values in (found.exp_avg | found.exp_avg_sq).values())


def test_a_gradient_large_but_finite_is_no_reason_to_skip(small_model: NewModel) -> None:
    """Its float32 square is not finite; the norm is added up in float64."""
    model = small_model(b_seed=1)
    tokens, inputs = datums(LENGTHS, weight=1e25)
    model.call(packed(tokens, inputs))
    found = model.step(USUAL, grad_clip_norm=1.0)
    assert not found.report.skipped
    assert 1e20 < found.report.grad_norm < 1e35
    held = float(dumps.vector(found.exp_avg).norm()) / (1 - USUAL.beta1)
    assert held == pytest.approx(1.0, rel=1e-4)
