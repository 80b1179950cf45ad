"""Requests made by hand, and one way to run a loss on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor

from loss_hub import BatchInputs, DatumInputs, Evaluation, check, evaluate

Run = Callable[..., tuple[Evaluation, Tensor]]


@pytest.fixture
def run() -> Run:
    """`run(loss, logprobs, config=None, **inputs)`: one datum's evaluation, and its gradient."""

    def run_loss(
        name: str,
        logprobs: Sequence[float],
        config: Mapping[str, float] | None = None,
        /,
        **inputs: Sequence[float],
    ) -> tuple[Evaluation, Tensor]:
        lp_N = torch.tensor(logprobs, dtype=torch.float32, requires_grad=True)
        tensors = {key: torch.as_tensor(value, dtype=torch.float32) for key, value in inputs.items()}
        tensors["target_tokens"] = torch.zeros(lp_N.shape, dtype=torch.int64)
        request = check(name, config or {}, [DatumInputs(lp_N.shape[0], tensors)])
        batch: BatchInputs = request.batch([0])
        evaluation = evaluate(request.loss, lp_N, batch, request.config)
        evaluation.loss_sum.backward()
        assert lp_N.grad is not None
        return evaluation, lp_N.grad

    return run_loss
