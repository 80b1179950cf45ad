"""A loss that an installed package brings trains as the built-in ones do."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import loss_hub
from loss_hub import registry
from loss_hub.plugins import Plugins
from tests.support import dumps, plugins
from tests.support.models import Model
from tests.support.requests import datums, packed

LENGTHS = (7, 3, 11)
GAMMA = 1.5


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plugins.install_example(tmp_path_factory.mktemp("plugin") / "installed")


def test_one_call_of_the_example_has_the_loss_and_gradient_of_its_formula(
    installed: Path, small_model: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin gets the formula's derivative by autograd as weights of cross_entropy."""
    monkeypatch.syspath_prepend(installed)
    monkeypatch.setattr(registry, "_LOSSES", dict(registry._LOSSES))
    monkeypatch.setattr(registry, "_PLUGINS", Plugins())
    monkeypatch.delitem(sys.modules, "focal_loss", raising=False)
    assert "focal" in loss_hub.names()

    tokens, inputs = datums(LENGTHS, seed=3)
    model, twin = small_model(b_seed=1), small_model(b_seed=1)
    request = packed(tokens, inputs, loss="focal", config={"gamma": GAMMA})
    answer = model.call(pickle.loads(pickle.dumps(request)))  # as it travels to the ranks
    total = 0.0
    for datum, values in zip(inputs, answer.logprobs, strict=True):
        lp = torch.from_numpy(values).double().requires_grad_()
        term = -(datum.tensors["weights"].double() * (1 - lp.exp()) ** GAMMA * lp).sum()
        term.backward()
        total += term.item()
        assert lp.grad is not None
        datum.tensors["weights"] = -lp.grad.float()
    assert answer.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)

    twin.call(packed(tokens, inputs))
    wanted, found = dumps.vector(twin.step().gradient), dumps.vector(model.step().gradient)
    assert dumps.relative_l2(found, wanted) <= 1e-5
