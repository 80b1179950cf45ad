"""A base model in bfloat16: adapters stay float32, and what holds bit for bit in float32 holds in it too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from actors import engine
from actors.contract import EngineConfig, FullConfig
from actors.engine import Engine
from actors.packing import PackingConfig
from bus.events import AdamParams
from tests.support import dumps, reference
from tests.support.adamw import TorchAdamW, difference
from tests.support.models import Model
from tests.support.requests import datums, packed

LENGTHS = (7, 3, 11, 2, 5, 16, 9, 4)
SPLITS = {"2x4": (4, 4), "8x1": (1,) * 8, "8 and a zero": (8, 0)}
ONE_DATUM = PackingConfig(max_datums_per_microbatch=1)


@pytest.fixture(scope="module", params=[False, True], ids=["whole head", "fused head"])
def opened(request: pytest.FixtureRequest, tiny_folder: Path, dump_folder: Path) -> Iterator[Engine]:
    torch.set_num_threads(1)
    config = EngineConfig(tiny_folder, dump_gradients=dump_folder, dtype="bfloat16", fused_head=request.param)
    with engine.opened(config, 0, dist.HashStore()) as opened:
        yield opened


@pytest.fixture
def model(opened: Engine, dump_folder: Path) -> Callable[[], Model]:
    return lambda: Model(opened, dump_folder, b_seed=4)


@pytest.fixture(scope="module")
def dump_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dump")


def gradient(model: Model, sizes: tuple[int, ...]) -> torch.Tensor:
    """The window's gradient of `LENGTHS`, `sizes` datums a call; 0 stands for a datum without weight."""
    tokens, inputs = datums(LENGTHS, seed=5)
    start = 0
    for size in sizes:
        here = slice(start, start + size)
        part = (tokens[here], inputs[here]) if size else datums((6,), seed=9, weight=0.0)
        model.call(packed(*part, packing=ONE_DATUM))
        start += size
    return dumps.vector(model.step().gradient)


def test_the_base_is_bfloat16_and_the_adapter_float32(opened: Engine, model: Callable[[], Model]) -> None:
    tenant = model().tenant
    assert {p.dtype for chunk in opened.base for p in chunk.parameters()} == {torch.bfloat16}
    assert {p.dtype for module in tenant.trained for p in module.parameters()} == {torch.float32}
    assert {gradient.dtype for gradient in tenant.window.buffers()} == {torch.float32}


def test_rounding_takes_logprobs_and_gradients_no_farther_than_it_takes_those_of_transformers(
    model: Callable[[], Model], tiny_folder: Path
) -> None:
    ours = model()
    exact = reference.Reference(tiny_folder, rank=8)
    rounded = reference.Reference(tiny_folder, rank=8, dtype=torch.bfloat16)
    tokens, inputs = datums(LENGTHS, seed=1)
    for other in (exact, rounded):
        other.set_weights(ours.weights())
    logprobs, _ = exact.accumulate("cross_entropy", tokens, inputs)
    coarse, _ = rounded.accumulate("cross_entropy", tokens, inputs)
    found = ours.call(packed(tokens, inputs)).logprobs
    assert 0 < reference.worst(found, logprobs) <= 1.5 * reference.worst(coarse, logprobs)
    gradient = dumps.vector(exact.gradient())
    theirs = dumps.relative_l2(dumps.vector(rounded.gradient()), gradient)
    assert dumps.relative_l2(dumps.vector(ours.step().gradient), gradient) <= 1.5 * theirs


@pytest.mark.parametrize("split", SPLITS)
def test_splits_of_a_window_give_the_same_bits(model: Callable[[], Model], split: str) -> None:
    whole = gradient(model(), (8,))
    assert whole.norm() > 1
    assert torch.equal(gradient(model(), SPLITS[split]), whole)


def test_forward_and_forward_backward_give_the_same_bits(model: Callable[[], Model]) -> None:
    ours = model()
    tokens, inputs = datums(LENGTHS, seed=2)
    scored = ours.call(packed(tokens, inputs, forward_only=True)).logprobs
    trained = ours.call(packed(tokens, inputs)).logprobs
    for one, other in zip(scored, trained, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


def test_adapters_step_as_torch_steps_them_in_float32(model: Callable[[], Model]) -> None:
    ours = model()
    exact = TorchAdamW(ours.weights())
    ours.call(packed(*datums(LENGTHS, seed=3)))
    step = ours.step(AdamParams(learning_rate=1e-3))
    assert difference(step.after, exact.step(step.gradient, AdamParams(learning_rate=1e-3))) <= 1e-9


def test_training_every_parameter_is_refused(opened: Engine) -> None:
    with pytest.raises(ValueError, match="use a LoRA adapter, or dtype float32"):
        opened.create("full", FullConfig())
