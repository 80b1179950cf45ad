"""`forward` runs on the training path: fused head and fake INT4 included, whatever the layout."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from actors.contract import EngineConfig
from actors.group import RequestOutput
from actors.layout import Layout
from actors.transforms.fake_int4 import FakeInt4
from tests.support import dumps, layouts, reference
from tests.support.folders import random_folder
from tests.support.layouts import Trained
from tests.support.requests import datums, packed
from tests.support.world import World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

Convention = Literal["rtn", "kimi"]
LENGTHS = (9, 4, 17, 6)
PATTERN = {"qwen3": "model.layers.*.mlp.*_proj", "qwen3_moe": "model.layers.*.mlp.experts.*"}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(2) as world:
        yield world


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models whose inputs to split layers are whole groups on each of two ranks; a vocabulary that is not even."""
    root = tmp_path_factory.mktemp("models")
    sizes = {"intermediate_size": 128, "hidden_size": 64, "vocab_size": 321}
    return {
        "qwen3": random_folder(root / "qwen3", "qwen3", tied=True, **sizes),
        "qwen3_moe": random_folder(root / "qwen3_moe", "qwen3_moe", **sizes, moe_intermediate_size=40),
    }


def quantized_in_float64(weight: Tensor, convention: Convention) -> Tensor:
    """What the documentation says, number by number."""
    divisor, low = {"rtn": (7.5, -8), "kimi": (7.0, -7)}[convention]
    out = weight.double().clone()
    for row in out:
        for start in range(0, len(row), 32):
            group = row[start : start + 32]
            scale = float(torch.tensor(float(group.abs().max()) / divisor, dtype=torch.float32).bfloat16())
            if scale > 0:
                group.copy_((group / scale).round().clamp(low, 7) * scale)
            else:
                group.zero_()
    return out.float()


def outputs(
    world: World, config: EngineConfig, trained: Trained
) -> tuple[RequestOutput, RequestOutput, dict[str, Tensor]]:
    """A forward, a forward_backward of the same request, and the gradient."""
    tokens, inputs = datums(LENGTHS, loss="importance_sampling", seed=3)
    loss = "importance_sampling"
    with world.opened(config) as ranks:
        model = layouts.Model(ranks, trained, b_seed=1)
        scored = model.call(packed(tokens, inputs, loss=loss, forward_only=True))
        done = model.call(packed(tokens, inputs, loss=loss))
        return scored, done, model.step()["gradient"]


def logprobs(folder: Path, convention: Convention | None, pattern: str) -> list[Tensor]:
    """By transformers, on weights that were quantized beforehand."""
    model = reference.load(folder)
    tokens, inputs = datums(LENGTHS, loss="importance_sampling", seed=3)
    with torch.no_grad():
        for name, module in model.named_modules():
            if convention and isinstance(module, torch.nn.Linear) and fnmatchcase(name, pattern):
                module.weight.copy_(quantized_in_float64(module.weight, convention))
        return [
            torch.log_softmax(model(input_ids=t[None], use_cache=False).logits[0], -1).gather(
                1, i.tensors["target_tokens"][:, None]
            )[:, 0]
            for t, i in zip(tokens, inputs, strict=True)
        ]


@pytest.mark.parametrize("trained", layouts.TRAINED)
@pytest.mark.parametrize("fused", [False, True], ids=["plain-head", "fused-head"])
@pytest.mark.parametrize("convention", [None, "rtn", "kimi"])
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", Layout()),
        ("qwen3", Layout(tp=2)),
        ("qwen3", Layout(tp=2, sequence_parallel=True)),
        ("qwen3_moe", Layout(dp=2, ep=2)),
    ],
    ids=["TP1", "TP2", "TP2-SP", "EP2"],
)
def test_forward_has_the_bits_of_forward_backward(
    world: World,
    folders: dict[str, Path],
    tmp_path: Path,
    family: str,
    layout: Layout,
    convention: Convention | None,
    fused: bool,
    trained: Trained,
) -> None:
    config = EngineConfig(
        folders[family],
        layout,
        dump_gradients=tmp_path,
        fused_head=fused,
        fake_int4=FakeInt4(convention, (PATTERN[family],)) if convention else None,
    )
    scored, done, gradient = outputs(world, config, trained)
    for a, b in zip(scored.logprobs, done.logprobs, strict=True):
        assert a.tobytes() == b.tobytes()
    assert scored.metrics == done.metrics
    assert all(torch.isfinite(values).all() for values in gradient.values())
    if trained == "full":  # an adapter with a random B is not in transformers' logprobs
        assert reference.worst(done.logprobs, logprobs(folders[family], convention, PATTERN[family])) <= 1e-5
        if convention:
            plain = logprobs(folders[family], None, PATTERN[family])
            assert reference.worst(done.logprobs, plain) > 1e-3


@pytest.mark.parametrize("trained", layouts.TRAINED)
def test_a_fused_head_trains_like_a_plain_one(
    world: World, folders: dict[str, Path], tmp_path: Path, trained: Trained
) -> None:
    for layout in (Layout(), Layout(tp=2), Layout(tp=2, sequence_parallel=True), Layout(pp=2)):
        gradients = [
            outputs(
                world,
                EngineConfig(folders["qwen3"], layout, dump_gradients=tmp_path, fused_head=fused),
                trained,
            )[2]
            for fused in (False, True)
        ]
        assert gradients[0].keys() == gradients[1].keys()
        plain, fused = map(dumps.vector, gradients)
        assert dumps.relative_l2(fused, plain) <= 2e-6


@pytest.mark.parametrize("convention", ["rtn", "kimi"])
def test_full_training_goes_straight_through_the_rounding(
    world: World, folders: dict[str, Path], tmp_path: Path, convention: Convention
) -> None:
    """Gradients are those of the quantized weights; the step is applied to the weights behind them."""
    pattern = PATTERN["qwen3"]
    tokens, inputs = datums(LENGTHS, seed=3)
    other = reference.FullReference(folders["qwen3"])
    quantized = [
        f"{name}.weight"
        for name, module in other.model.named_modules()
        if isinstance(module, torch.nn.Linear) and fnmatchcase(name, pattern)
    ]
    assert len(quantized) == 6
    config = EngineConfig(
        folders["qwen3"], Layout(tp=2), dump_gradients=tmp_path, fake_int4=FakeInt4(convention, (pattern,))
    )
    with world.opened(config) as ranks:
        model = layouts.Model(ranks, "full")
        exact = layouts.TorchAdamW(model.weights())
        for _ in range(3):
            weights = model.weights()
            for name in quantized:
                weights[name] = quantized_in_float64(weights[name], convention)
            other.set_weights(weights)
            expected, _ = other.accumulate("cross_entropy", tokens, inputs)
            found = model.call(packed(tokens, inputs))
            step = model.step()
            assert reference.worst(found.logprobs, expected) <= 1e-5
            theirs = other.gradient()
            assert dumps.relative_l2(dumps.vector(step["gradient"]), dumps.vector(theirs)) <= 5e-6
            after = exact.step(step["gradient"], layouts.ADAM)
            assert layouts.difference(step["after"], after) <= 1e-9
