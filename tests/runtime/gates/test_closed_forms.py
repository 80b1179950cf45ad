"""The closed forms against torch: the documented formulas written once more, their derivatives by autograd."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime.gates.closed_forms import CLOSED_FORMS
from runtime.gates.losses import CONFIGS

Documented = Callable[[Tensor, Tensor, Tensor, dict[str, float]], Tensor]


def ratio(lp: Tensor, q: Tensor) -> Tensor:
    return torch.exp(lp - q)


def ppo(lp: Tensor, q: Tensor, a: Tensor, config: dict[str, float]) -> Tensor:
    low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
    return -torch.min(ratio(lp, q) * a, torch.clamp(ratio(lp, q), low, high) * a)


def cispo(lp: Tensor, q: Tensor, a: Tensor, config: dict[str, float]) -> Tensor:
    clipped = torch.clamp(ratio(lp, q), config["clip_low_threshold"], config["clip_high_threshold"])
    return -clipped.detach() * lp * a


def gspo(lp: Tensor, q: Tensor, a: Tensor, config: dict[str, float]) -> Tensor:
    ratios = torch.exp((lp.detach() - q).mean() + lp - lp.detach())
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    return -torch.min(ratios * a, torch.clamp(ratios, low, high) * a)


DOCUMENTED: dict[str, Documented] = {
    "importance_sampling": lambda lp, q, a, _: -ratio(lp, q) * a,
    "ppo": ppo,
    "cispo": cispo,
    "dro": lambda lp, q, a, config: -(lp * a - 0.5 * config["beta"] * (lp - q) ** 2),
    "gspo": gspo,
}
CASES = [(loss, config) for loss, configs in CONFIGS.items() for config in configs]

nats = st.floats(-8, -(2**-10), width=32)
tokens = st.lists(st.tuples(nats, nats, st.floats(-4, 4, width=32)), min_size=1, max_size=20)


def near_a_bound(lp: float, q: float, config: dict[str, float]) -> bool:
    """There the derivative has two values, and the exponential's last bit decides."""
    bounds = (0.8, 1.2, *config.values())
    return any(abs(np.exp(lp - q) - bound) < 1e-9 for bound in bounds)


@pytest.mark.parametrize(("loss", "config"), CASES)
@settings(deadline=None)
@given(values=tokens)
def test_value_and_derivative_of_every_token(
    loss: str, config: dict[str, float], values: list[tuple[float, float, float]]
) -> None:
    kept = [v for v in values if not near_a_bound(v[0], v[1], config)] or [(-1.0, -1.5, 1.0)]
    lp, q, a = (torch.tensor(column, dtype=torch.float64) for column in zip(*kept, strict=True))
    assume(loss != "gspo" or not near_a_bound(float((lp - q).mean()), 0.0, config))
    lp.requires_grad_()
    wanted = DOCUMENTED[loss](lp, q, a, config)
    (slope,) = torch.autograd.grad(wanted.sum(), lp)
    value, derivative = CLOSED_FORMS[loss](lp.detach().numpy(), q.numpy(), a.numpy(), config)
    np.testing.assert_allclose(value, wanted.detach().numpy(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(derivative, slope.numpy(), rtol=1e-12, atol=1e-12)
