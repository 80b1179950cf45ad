"""Saved and loaded on one rank: what goes on, what starts anew, and what a failure leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from actors import checkpoint_files, tensor_file
from actors.contract import FullConfig, PassFailed, TenantConfig
from actors.engine import Engine
from bus.events import AdamParams
from tests.support import checkpoints
from tests.support.adamw import TorchAdamW, difference
from tests.support.models import ADAPTER, Model, Step, assert_same_bits
from tests.support.requests import datums, packed

pytestmark = pytest.mark.slow

ADAM = AdamParams(learning_rate=1e-3, eps=1e-8, weight_decay=0.1)
CONFIGS: dict[str, TenantConfig] = {"LoRA": ADAPTER, "full": FullConfig()}


@pytest.fixture(params=list(CONFIGS))
def config(request: pytest.FixtureRequest) -> TenantConfig:
    return CONFIGS[request.param]


def train(model: Model, seed: int, adam: AdamParams = ADAM) -> Step:
    model.call(packed(*datums((7, 3, 11), seed=seed)))
    return model.step(adam)


@pytest.fixture
def trained(small_model: Callable[..., Model], config: TenantConfig) -> Model:
    """After two steps."""
    model = small_model(config)
    train(model, 1)
    train(model, 2)
    return model


def saved(
    engine: Engine, model: Model, config: TenantConfig, tmp_path: Path, base: Path, *, optimizer: bool = True
) -> Path:
    return checkpoints.save(
        checkpoints.on(engine), model.id, config, tmp_path / "saved", base, optimizer=optimizer
    )


def test_a_model_goes_on_from_a_checkpoint_as_if_nothing_had_happened(
    small_engine: Engine,
    small_model: Callable[..., Model],
    small_folder: Path,
    trained: Model,
    config: TenantConfig,
    tmp_path: Path,
) -> None:
    folder = saved(small_engine, trained, config, tmp_path, small_folder)
    wanted = [train(trained, seed) for seed in (3, 4)]
    other = small_model(config)  # one with a history of its own, and an open window
    train(other, 8)
    train(other, 9)
    other.call(packed(*datums((5,), seed=10)))
    small_engine.load(other.id, folder, True)
    other._steps = 2  # as its dumps are numbered
    for seed, step in zip((3, 4), wanted, strict=True):
        found = train(other, seed)
        assert_same_bits(found.everything(), step.everything())
        assert found.report.step == step.report.step
        assert found.report.window_calls == 1


def test_loading_without_the_optimizer_starts_a_cold_one_and_keeps_the_weights(
    small_engine: Engine,
    small_model: Callable[..., Model],
    small_folder: Path,
    trained: Model,
    config: TenantConfig,
    tmp_path: Path,
) -> None:
    folder = saved(small_engine, trained, config, tmp_path, small_folder)
    weights = trained.weights()
    cold = small_model(config)
    train(cold, 8)
    small_engine.load(cold.id, folder, False)
    cold._steps = 0
    exact = TorchAdamW(weights)
    for seed in (3, 4):  # two: the first step alone would not show a moment that should have been forgotten
        found = train(cold, seed)
        assert difference(found.after, exact.step(found.gradient, ADAM)) <= 1e-6
        assert difference(found.exp_avg, exact.moment("exp_avg")) <= 1e-7
        assert found.report.step == seed - 2
    warm = train(trained, 3)
    assert difference(warm.exp_avg, found.exp_avg) > 1e-4
    assert_same_bits(warm.before, weights)


def test_saving_leaves_the_open_window_alone(
    small_engine: Engine, small_folder: Path, trained: Model, config: TenantConfig, tmp_path: Path
) -> None:
    trained.call(packed(*datums((7, 3), seed=5)))
    window = trained.window()
    saved(small_engine, trained, config, tmp_path, small_folder)
    assert all(map(torch.equal, trained.window(), window))
    assert trained.step(ADAM).report.window_calls == 1


def test_a_checkpoint_that_cannot_be_read_changes_nothing(
    small_engine: Engine, small_folder: Path, trained: Model, config: TenantConfig, tmp_path: Path
) -> None:
    folder = saved(small_engine, trained, config, tmp_path, small_folder)
    file, _ = checkpoint_files.weights_file(folder, config)
    trained.call(packed(*datums((7, 3), seed=5)))
    weights, window = trained.weights(), trained.window()
    whole = file.read_bytes()
    (folder / checkpoint_files.OPTIMIZER).unlink()
    with pytest.raises(PassFailed, match="optimizer"):
        small_engine.load(trained.id, folder, True)
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(PassFailed):
        small_engine.load(trained.id, folder, False)
    file.unlink()
    with pytest.raises(PassFailed):
        small_engine.create_from("never", config, folder, False)
    assert "never" not in small_engine.tenants
    assert_same_bits(trained.weights(), weights)
    assert all(map(torch.equal, trained.window(), window))
    assert trained.step(ADAM).report.step == 3


def test_what_is_written_tensor_by_tensor_is_what_the_library_reads(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(6.0).reshape(2, 3).t(),
        "b": torch.tensor([0.5, -2.0], dtype=torch.bfloat16),
        "none": torch.empty(0, 4),
    }
    file = tmp_path / "x.safetensors"
    described = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    tensor_file.write(file, described, tensors.__getitem__, {"note": "ü"})
    assert_same_bits(load_file(file), tensors)
    assert safe_open(file, framework="pt").metadata() == {"format": "pt", "note": "ü"}
    read = tensor_file.TensorFile(file)
    assert read("b", 2).dtype == torch.float32
    with pytest.raises(ValueError, match=r"a has shape \(3, 2\), not \(2, 3\)"):
        read("a", 2, 3)
    with pytest.raises(ValueError, match="lacks the tensor 'c'"):
        read("c", 1)
