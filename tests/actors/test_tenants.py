"""Models on one base do not feel each other."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from actors.contract import AdapterConfig
from actors.engine import Engine
from tests.support.models import Model
from tests.support.requests import random_request

NewModel = Callable[..., Model]
A = AdapterConfig(rank=8, alpha=32, seed=1)
B = AdapterConfig(rank=3, alpha=32, seed=2, train_mlp=False)


def bits_of_b(model: Model) -> dict[str, torch.Tensor]:
    return model.weights() | {f"window.{i}": g for i, g in enumerate(model.window())}


def test_a_step_of_one_model_leaves_the_window_and_weights_of_another(small_model: NewModel) -> None:
    """A(fb), B(fb), A(optim), B(fb), A(fb), A(optim), B(optim), against each on its own."""
    a, b = small_model(A, b_seed=1), small_model(B, b_seed=2)
    a.call(random_request((7, 3), seed=1))
    b.call(random_request((5, 9), loss="ppo", seed=2))
    held = bits_of_b(b)
    found_a = [a.step(learning_rate=1e-2)]
    assert all(torch.equal(bits_of_b(b)[name], values) for name, values in held.items())
    b.call(random_request((4,), seed=3))
    a.call(random_request((6, 6), seed=4))
    found_a.append(a.step(learning_rate=1e-2))
    found_b = [b.step(learning_rate=1e-2)]
    assert found_a[0].report.window_calls == found_a[1].report.window_calls == 1
    assert found_b[0].report.window_calls == 2

    alone = small_model(A, b_seed=1)
    wanted_a = []
    for lengths, seed in (((7, 3), 1), ((6, 6), 4)):
        alone.call(random_request(lengths, seed=seed))
        wanted_a.append(alone.step(learning_rate=1e-2))
    other = small_model(B, b_seed=2)
    other.call(random_request((5, 9), loss="ppo", seed=2))
    other.call(random_request((4,), seed=3))
    wanted_b = [other.step(learning_rate=1e-2)]

    for found, wanted in zip(found_a + found_b, wanted_a + wanted_b, strict=True):
        wanted_bits, found_bits = wanted.everything(), found.everything()
        assert found_bits.keys() == wanted_bits.keys()
        for name, values in wanted_bits.items():
            assert torch.equal(found_bits[name], values), name


def test_training_leaves_the_base_model_alone(small_model: NewModel, small_engine: Engine) -> None:
    before = {name: p.clone() for name, p in small_engine.base[0].named_parameters()}
    model = small_model(A, b_seed=1)
    model.call(random_request((7, 3)))
    model.step(learning_rate=1.0, weight_decay=0.5)
    for name, parameter in small_engine.base[0].named_parameters():
        assert torch.equal(parameter, before[name]), name
        assert parameter.grad is None
        assert not parameter.requires_grad


def test_a_dropped_model_frees_its_memory_and_its_name(small_model: NewModel, small_engine: Engine) -> None:
    model = small_model(A)
    model.call(random_request((5,)))
    model.step()
    tenant = model.tenant
    gone = [weakref.ref(x) for x in (tenant.ddps[0], tenant.trained[0], next(tenant.trained[0].parameters()))]
    before = len(small_engine.tenants)
    del tenant
    small_engine.unload(model.id)
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3
    assert len(small_engine.tenants) == before - 1
    assert model.id not in small_engine.tenants
    small_engine.create(model.id, A)
    assert model.window()[0].norm() == 0


def test_a_name_in_use_and_one_that_is_not_are_errors(small_model: NewModel, small_engine: Engine) -> None:
    model = small_model(A)
    with pytest.raises(ValueError, match="in memory already"):
        small_engine.create(model.id, A)
    with pytest.raises(KeyError, match="nobody"):
        small_engine.forward_backward("nobody", random_request((3,)))
