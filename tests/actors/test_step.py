"""What a step leaves behind: an empty window and no trace of the last one, also where there was nothing in it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch

from bus.events import AdamParams
from tests.support.adamw import TorchAdamW, difference
from tests.support.models import Model, assert_same_bits
from tests.support.requests import random_request

NewModel = Callable[..., Model]
LENGTHS = (7, 3, 11)
USUAL = AdamParams(learning_rate=1e-3, eps=1e-8)


def test_an_empty_window_is_a_zero_gradient_to_a_fresh_model(small_model: NewModel) -> None:
    model = small_model()
    before = model.weights()
    found = model.step(learning_rate=0.5, weight_decay=0.1)
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
    first = model.step(adam)
    torchs.step(first.gradient, adam)
    second = model.step(adam)
    assert second.report.grad_norm == 0.0
    assert all((values == 0).all() for values in second.gradient.values())
    zero = {name: torch.zeros_like(values) for name, values in first.gradient.items()}
    assert difference(torchs.step(zero, adam), second.after) <= 1e-9
    assert difference(second.after, first.after) > 1e-4


def test_everything_is_zero_after_a_step_and_nothing_before_it_is(small_model: NewModel) -> None:
    model = small_model(b_seed=1)
    model.call(random_request(LENGTHS))
    assert all(gradients.norm() > 1 for gradients in model.window())
    model.step(USUAL)
    assert all((gradients == 0).all() for gradients in model.window())
    window = model.tenant.window
    assert (window.calls, window.microbatches, window.tokens) == (0, 0, 0)
    for parameter in model.tenant.trained[0].parameters():
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
        gradients.append(model.step(still).gradient)
    assert_same_bits(gradients[1], gradients[0])
    assert_same_bits(gradients[2], {name: 2 * values for name, values in gradients[0].items()})
