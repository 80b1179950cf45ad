"""A pass that fails half way leaves the window as it was, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from actors import loss_pass
from actors.contract import PassFailed, WindowIncomplete
from actors.engine import Engine
from actors.packing import PackedRequest, PackingConfig
from tests.support.models import Model
from tests.support.requests import datums, packed, random_request

NewModel = Callable[..., Model]
LENGTHS = (7, 3, 11)
ONE_BY_ONE = PackingConfig(max_datums_per_microbatch=1)


def poisoned(*, forward_only: bool = False) -> PackedRequest:
    """Three microbatches, the last with a token the model does not have. The dispatcher would refuse it."""
    tokens, inputs = datums((5, 6, 4), seed=7)
    tokens[2] = torch.tensor([1, 10_000, 3, 4])
    return packed(tokens, inputs, packing=ONE_BY_ONE, forward_only=forward_only)


def counts(model: Model) -> tuple[int, int, int]:
    window = model.tenant.window
    return window.calls, window.microbatches, window.tokens


def test_a_pass_that_fails_after_some_microbatches_leaves_the_window_bit_for_bit(
    small_model: NewModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(b_seed=1)
    model.call(random_request(LENGTHS, packing=ONE_BY_ONE))
    before, counted = model.window(), counts(model)
    assert counted == (1, 3, 21)

    during: list[list[torch.Tensor]] = []
    evaluate = loss_pass.evaluate

    def watched(*args: Any) -> Any:
        during.append(model.window())
        return evaluate(*args)

    monkeypatch.setattr(loss_pass, "evaluate", watched)
    with pytest.raises(PassFailed, match="index out of range"):
        model.call(poisoned())
    # The first microbatch had been added when the second was evaluated; the third never got there.
    assert len(during) == 2
    assert not torch.equal(during[1][0], before[0])
    assert all(map(torch.equal, model.window(), before))
    assert counts(model) == counted


def test_the_step_after_a_failed_pass_is_the_one_without_it(small_model: NewModel) -> None:
    def stepped(*, interrupted: bool) -> dict[str, torch.Tensor]:
        model = small_model(b_seed=1)
        model.call(random_request(LENGTHS, seed=1, packing=ONE_BY_ONE))
        if interrupted:
            with pytest.raises(PassFailed):
                model.call(poisoned(), label=4)
        model.call(random_request(LENGTHS, seed=2, packing=ONE_BY_ONE))
        step = model.step(learning_rate=1e-2, accept_lost=frozenset({4}))
        assert step.report.window_calls == 2
        return step.everything()

    plain, interrupted = stepped(interrupted=False), stepped(interrupted=True)
    assert all(torch.equal(interrupted[name], values) for name, values in plain.items())


def test_a_failed_pass_into_an_empty_window_leaves_it_empty(small_model: NewModel) -> None:
    model = small_model(b_seed=1)
    with pytest.raises(PassFailed):
        model.call(poisoned())
    assert all((gradients == 0).all() for gradients in model.window())
    assert counts(model) == (0, 0, 0)
    assert model.step(accept_lost=frozenset({0})).report.grad_norm == 0.0


def test_a_step_that_did_not_know_of_a_lost_call_names_it_clears_the_window_and_moves_nothing(
    small_model: NewModel,
) -> None:
    model = small_model(b_seed=1)
    before = model.weights()
    model.call(random_request(LENGTHS), label=1)
    for label in (3, 2):
        with pytest.raises(PassFailed):
            model.call(poisoned(), label=label)
    with pytest.raises(WindowIncomplete, match="lost call 2") as caught:
        model.step(accept_lost=frozenset({3}))
    assert caught.value.label == 2
    assert all((gradients == 0).all() for gradients in model.window())
    assert counts(model) == (0, 0, 0)
    assert all(torch.equal(model.weights()[name], values) for name, values in before.items())

    # The loss is told once: the next window is a whole one, and the first of this model.
    model.call(random_request(LENGTHS, seed=1))
    found = model.step().everything()
    untouched = small_model(b_seed=1)
    untouched.call(random_request(LENGTHS, seed=1))
    for name, values in untouched.step().everything().items():
        assert torch.equal(found[name], values), name


def test_a_failed_forward_leaves_the_window_too(small_model: NewModel) -> None:
    model = small_model(b_seed=1)
    model.call(random_request(LENGTHS))
    before, counted = model.window(), counts(model)
    with pytest.raises(PassFailed):
        model.call(poisoned(forward_only=True))
    assert all(map(torch.equal, model.window(), before))
    assert counts(model) == counted
    assert not model.step().report.skipped  # a forward is no part of the window, so none was lost


def test_a_failure_in_the_backward_of_a_later_microbatch_is_undone_as_well(
    small_model: NewModel, small_engine: Engine
) -> None:
    model = small_model(b_seed=1)
    model.call(random_request(LENGTHS))
    before = model.window()
    seen = 0

    def fail(grad: torch.Tensor) -> None:
        nonlocal seen
        seen += 1
        if seen == 2:
            raise ValueError("lost in the second backward")

    def watch(module: Any, args: Any, output: tuple[torch.Tensor, Any]) -> None:
        if output[0].requires_grad:
            output[0].register_hook(fail)

    # In the middle of the model: what stands above it has its gradient already.
    layer = small_engine.base[0].decoder.layers[0].mlp.linear_fc2
    handle = layer.register_forward_hook(watch)
    try:
        with pytest.raises(PassFailed, match="lost in the second backward"):
            model.call(random_request((5, 6, 4), seed=7, packing=ONE_BY_ONE))
    finally:
        handle.remove()
    assert seen == 2
    assert all(map(torch.equal, model.window(), before))
    # Nothing half done waits in param.grad for the next call.
    assert all(parameter.grad is None for parameter in model.tenant.trained[0].parameters())


def test_a_window_counts_calls_microbatches_and_tokens(small_model: NewModel) -> None:
    model = small_model()
    model.call(random_request(LENGTHS, packing=ONE_BY_ONE))
    model.call(random_request((4, 4)))
    model.call(random_request((9,), forward_only=True))
    assert counts(model) == (2, 4, 29)
    report = model.step().report
    assert (report.window_calls, report.window_tokens, report.finalizations) == (2, 29, 1)
