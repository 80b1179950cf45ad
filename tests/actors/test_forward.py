"""`forward` is the training forward: the same bits as `forward_backward`, and no trace left behind."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from actors.contract import AdapterConfig
from actors.engine import Engine
from actors.packing import PackingConfig
from loss_hub import names
from tests.support.models import Model
from tests.support.requests import random_request

ALL_LOSSES = ["cispo", "cross_entropy", "dro", "gspo", "importance_sampling", "ppo"]
LENGTHS = (7, 3, 11, 2, 5)
TWO_MICROBATCHES = PackingConfig(max_tokens_per_microbatch=22)


def test_these_are_all_losses() -> None:
    assert set(ALL_LOSSES) <= set(names())


@pytest.mark.parametrize("loss", ALL_LOSSES)
def test_forward_has_the_logprobs_and_metrics_of_forward_backward_bit_for_bit(
    tiny_model: Callable[..., Model], loss: str
) -> None:
    model = tiny_model(b_seed=1)
    scored = model.call(random_request(LENGTHS, loss=loss, packing=TWO_MICROBATCHES, forward_only=True))
    trained = model.call(random_request(LENGTHS, loss=loss, packing=TWO_MICROBATCHES))
    for i, n in enumerate(LENGTHS):
        assert scored.logprobs[i].shape == (n,)
        assert scored.logprobs[i].dtype == np.float32
        assert scored.logprobs[i].tobytes() == trained.logprobs[i].tobytes()
    assert scored.metrics == trained.metrics
    assert scored.metrics["loss:sum"] != 0


@pytest.mark.parametrize("loss", ALL_LOSSES)
def test_forward_between_two_calls_changes_no_bit_of_the_next_step(
    tiny_model: Callable[..., Model], loss: str
) -> None:
    def steps(*, with_forward: bool) -> list[dict[str, torch.Tensor]]:
        model = tiny_model(b_seed=1)
        found = []
        for number in range(2):
            model.call(random_request(LENGTHS, loss=loss, seed=number, packing=TWO_MICROBATCHES))
            if with_forward:
                window, tenant = model.window(), model.tenant.window
                counts = (tenant.calls, tenant.microbatches, tenant.tokens)
                model.call(random_request((13, 4), loss=loss, seed=9, forward_only=True))
                assert counts == (tenant.calls, tenant.microbatches, tenant.tokens)
                assert all(map(torch.equal, model.window(), window))
            model.call(random_request((6, 6), loss=loss, seed=10 + number))
            found.append(model.step(learning_rate=1e-2).everything())
        return found

    for plain, interrupted in zip(steps(with_forward=False), steps(with_forward=True), strict=True):
        assert plain.keys() == interrupted.keys()
        for name, values in plain.items():
            assert torch.equal(interrupted[name], values), name


def test_forward_of_a_window_that_is_empty_leaves_it_empty(tiny_model: Callable[..., Model]) -> None:
    model = tiny_model(b_seed=1)
    model.call(random_request(LENGTHS, forward_only=True))
    assert all((gradients == 0).all() for gradients in model.window())
    assert all(parameter.grad is None for parameter in model.tenant.trained[0].parameters())


def test_neither_kind_of_pass_changes_any_modules_train_mode(
    tiny_model: Callable[..., Model], tiny_engine: Engine
) -> None:
    model = tiny_model(AdapterConfig(rank=4, alpha=32, seed=1))
    modules = [*tiny_engine.base[0].modules(), *model.tenant.ddps[0].modules()]
    before = [module.training for module in modules]
    for forward_only in (True, False, True):
        model.call(random_request(LENGTHS, forward_only=forward_only))
        assert [module.training for module in modules] == before
        assert torch.is_grad_enabled()
