"""Gradients of small random models of every family equal PEFT's, and those of partial adapters and K targets too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from actors import engine
from actors.contract import AdapterConfig, EngineConfig
from actors.engine import Engine
from loss_hub import DatumInputs
from tests.support.folders import Family, random_folder
from tests.support.models import Model
from tests.support.reference import Reference, assert_gradients_agree, worst
from tests.support.requests import datums, packed, random_tokens

LENGTHS = (11, 4, 7)


@contextmanager
def opened(folder: Path, dump: Path) -> Iterator[Engine]:
    torch.set_num_threads(1)
    with engine.opened(EngineConfig(folder, dump_gradients=dump), 0, dist.HashStore()) as here:
        yield here


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling"])
@pytest.mark.parametrize(
    ("family", "tied"),
    [("qwen2", True), ("qwen2", False), ("qwen3", False), ("llama", False), ("llama", True)],
)
def test_the_gradient_of_a_random_model_is_pefts(
    tmp_path: Path, family: Family, tied: bool, loss: str
) -> None:
    folder = random_folder(tmp_path / "model", family, tied=tied, seed=4)
    peft = Reference(folder, rank=5)
    tokens, inputs = datums(LENGTHS, loss=loss, seed=6)
    with opened(folder, tmp_path / "dump") as here:
        model = Model(here, tmp_path / "dump", AdapterConfig(rank=5, alpha=32, seed=1), b_seed=2)
        peft.set_weights(model.weights())
        logprobs, _ = peft.accumulate(loss, tokens, inputs)
        result = model.call(packed(tokens, inputs, loss=loss))
        assert worst(result.logprobs, logprobs) <= 1e-5
        assert_gradients_agree(model.step().gradient, peft.gradient())


@pytest.mark.parametrize(
    ("flag", "targets"),
    [
        ("train_attn", ["q_proj", "k_proj", "v_proj", "o_proj"]),
        ("train_mlp", ["gate_proj", "up_proj", "down_proj"]),
        ("train_unembed", ["lm_head"]),
    ],
)
def test_each_train_flag_adapts_its_layers_and_no_others(
    tmp_path: Path, small_folder: Path, flag: str, targets: list[str]
) -> None:
    peft = Reference(small_folder, rank=3, alpha=6, targets=targets)
    off = {"train_attn": False, "train_mlp": False, "train_unembed": False}
    tokens, inputs = datums(LENGTHS, seed=8)
    with opened(small_folder, tmp_path) as here:
        model = Model(here, tmp_path, AdapterConfig(rank=3, alpha=6, seed=1, **off | {flag: True}), b_seed=2)
        peft.set_weights(model.weights())  # same names, or it fails
        peft.accumulate("cross_entropy", tokens, inputs)
        model.call(packed(tokens, inputs))
        assert_gradients_agree(model.step().gradient, peft.gradient())


def test_k_targets_a_position_give_the_sum_over_k_in_value_and_gradient(
    tmp_path: Path, small_folder: Path
) -> None:
    """−Σ_t Σ_k w_tk · lp_tk by torch's log_softmax; datums of K = 3, 1-D and K = 1 in one microbatch."""
    peft = Reference(small_folder, rank=4)
    generator = torch.Generator().manual_seed(3)
    tokens = [full[:-1] for full in random_tokens((6, 5, 3), seed=9)]
    shapes = [(6, 3), (5,), (3, 1)]
    inputs = [
        DatumInputs(
            shape[0],
            {
                "target_tokens": torch.randint(0, 320, shape, generator=generator),
                "weights": torch.randn(shape, generator=generator),
            },
        )
        for shape in shapes
    ]
    with opened(small_folder, tmp_path) as here:
        model = Model(here, tmp_path, AdapterConfig(rank=4, alpha=32, seed=1), b_seed=2)
        peft.set_weights(model.weights())
        logprobs, loss_sum = peft.accumulate("cross_entropy", tokens, inputs)
        request = packed(tokens, inputs)
        assert request.microbatches == ((0, 1, 2),)
        result = model.call(request)
        assert [found.shape for found in result.logprobs] == shapes
        assert worst(result.logprobs, logprobs) <= 1e-5
        assert result.metrics["loss:sum"] == pytest.approx(loss_sum, abs=1e-4)
        assert_gradients_agree(model.step().gradient, peft.gradient())


def test_a_position_may_have_its_target_twice(tmp_path: Path, small_folder: Path) -> None:
    peft = Reference(small_folder, rank=4)
    tokens = [torch.tensor([5, 9])]
    inputs = [
        DatumInputs(
            2,
            {
                "target_tokens": torch.tensor([[7, 7, 3], [0, 0, 0]]),
                "weights": torch.tensor([[1.0, 0.5, -2.0], [1.0, 1.0, 1.0]]),
            },
        )
    ]
    with opened(small_folder, tmp_path) as here:
        model = Model(here, tmp_path, AdapterConfig(rank=4, alpha=32, seed=1), b_seed=2)
        peft.set_weights(model.weights())
        peft.accumulate("cross_entropy", tokens, inputs)
        model.call(packed(tokens, inputs))
        assert_gradients_agree(model.step().gradient, peft.gradient())
