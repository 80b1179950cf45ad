"""Positions without weight are selected out, not multiplied away, all the way down to the weights."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from actors import engine
from actors.contract import EngineConfig
from loss_hub import DatumInputs
from tests.support import dumps
from tests.support.folders import random_folder
from tests.support.models import Model
from tests.support.requests import packed, random_tokens

OVERFLOWS = 7
"""Of this token the folder below gives logits of ±inf, by the sign of one hidden dimension."""
DIMENSION = 12
N = 60


@pytest.fixture(scope="module")
def overflowing_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = random_folder(tmp_path_factory.mktemp("models") / "overflowing", seed=2)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][DIMENSION] = 1e3
    tensors["lm_head.weight"][:, DIMENSION] = 0
    tensors["lm_head.weight"][OVERFLOWS] = 0
    tensors["lm_head.weight"][OVERFLOWS, DIMENSION] = 3e38
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_logprobs_of_nan_and_minus_infinity_under_weight_zero_leave_loss_and_gradient_finite(
    overflowing_folder: Path, tmp_path: Path
) -> None:
    """Where the logit is +inf every logprob is NaN; where it is −inf, that of the token itself is −inf."""
    (full,) = random_tokens((N,), seed=1)
    tokens, targets = full[:-1], full[1:].clone()
    targets[::3] = OVERFLOWS
    config = EngineConfig(overflowing_folder, dump_gradients=tmp_path)
    with engine.opened(config, 0, dist.HashStore()) as opened:
        model = Model(opened, tmp_path, b_seed=1)
        model.set_weights({name: 0 * t for name, t in model.weights().items() if name.startswith("lm_head")})
        everything = DatumInputs(N, {"target_tokens": targets})
        (logprobs,) = model.call(packed([tokens], [everything], forward_only=True)).logprobs
        kept = torch.from_numpy(np.isfinite(logprobs))
        assert np.isnan(logprobs).sum() > 3
        assert np.isneginf(logprobs).sum() > 1
        assert kept.sum() > 3

        masked = DatumInputs(N, {"target_tokens": targets, "weights": kept.float()})
        output = model.call(packed([tokens], [masked]))
        assert output.metrics["loss:sum"] == pytest.approx(-float(logprobs[kept.numpy()].sum()), rel=1e-6)
        step = model.step()
        assert not step.report.skipped
        assert step.report.grad_norm > 1
        assert torch.isfinite(dumps.vector(step.gradient)).all()


@pytest.mark.parametrize("weight", [1.0, -1e-3])
def test_a_weight_on_such_a_position_is_seen_and_vetoed(
    overflowing_folder: Path, tmp_path: Path, weight: float
) -> None:
    (full,) = random_tokens((N,), seed=1)
    config = EngineConfig(overflowing_folder, dump_gradients=tmp_path)
    with engine.opened(config, 0, dist.HashStore()) as opened:
        model = Model(opened, tmp_path, b_seed=1)
        inputs = DatumInputs(N, {"target_tokens": full[1:], "weights": torch.full((N,), weight)})
        assert math.isnan(model.call(packed([full[:-1]], [inputs])).metrics["loss:sum"])
        assert model.step().report.skipped
