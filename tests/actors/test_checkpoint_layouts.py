"""A checkpoint is the same under every layout, weights and Adam state bit for bit, whoever saves and whoever loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from actors.contract import EngineConfig, FullConfig, TenantConfig
from actors.engine import Engine
from actors.layout import Layout
from actors.transforms.fake_int4 import FakeInt4
from tests.support import checkpoints, layouts
from tests.support.layouts import ADAM, ADAPTER, Base, Trained
from tests.support.models import assert_same_bits
from tests.support.reference import worst
from tests.support.requests import datums, packed
from tests.support.world import Ranks, World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SAVED_BY: dict[Base, Layout] = {
    "dense": Layout(tp=2, sequence_parallel=True),
    "moe": Layout(dp=2, ep=2, distributed_optimizer=True),
}
LOADED_BY: dict[Base, tuple[Layout, ...]] = {
    "dense": (Layout(dp=2, distributed_optimizer=True), Layout(pp=2)),
    "moe": (Layout(),),
}
SCORED = packed(*datums((7, 3, 11), seed=50), forward_only=True)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(2) as world:
        yield world


class Loaded(layouts.Model):
    """A model that starts from a checkpoint."""

    def __init__(
        self, ranks: Ranks, config: TenantConfig, folder: Path, *, optimizer: bool, steps: int
    ) -> None:
        self.id = f"loaded-{folder.parent.name}"
        self._ranks = ranks
        self._steps = steps
        ranks.call(checkpoints.create_from, self.id, config, folder, optimizer)


def train(model: layouts.Model, seed: int) -> dict[str, dict[str, Tensor]]:
    model.call(packed(*datums(layouts.LENGTHS, seed=seed)))
    return model.step(ADAM)


@pytest.mark.parametrize(
    ("base", "trained"), [("dense", "LoRA"), ("dense", "full"), ("moe", "LoRA"), ("moe", "full")]
)
def test_what_one_layout_saves_every_other_one_goes_on_from(
    world: World, tmp_path: Path, base: Base, trained: Trained
) -> None:
    config: TenantConfig = ADAPTER if trained == "LoRA" else FullConfig()
    here = layouts.folder(tmp_path, base)
    with world.opened(EngineConfig(here, SAVED_BY[base], dump_gradients=tmp_path / "dumps")) as ranks:
        model = layouts.Model(ranks, trained, b_seed=1)
        train(model, seed=1)
        train(model, seed=2)
        weights, logprobs = model.weights(), model.call(SCORED).logprobs
        saved = checkpoints.save(ranks.call, model.id, config, tmp_path / "saved", here)
        went_on = train(model, seed=3)
    for number, layout in enumerate(LOADED_BY[base]):
        with world.opened(EngineConfig(here, layout, dump_gradients=tmp_path / f"dumps-{number}")) as ranks:
            loaded = Loaded(ranks, config, saved, optimizer=True, steps=2)
            assert_same_bits(loaded.weights(), weights)
            assert worst(loaded.call(SCORED).logprobs, [torch.as_tensor(v) for v in logprobs]) <= 1e-6
            again = checkpoints.save(ranks.call, loaded.id, config, tmp_path / f"again-{number}", here)
            assert_same_bits(checkpoints.moments(again), checkpoints.moments(saved))
            assert any(values.abs().max() > 0 for values in checkpoints.moments(again).values())
            step = train(loaded, seed=3)
            assert_same_bits(step["before"], weights)
            for kind in ("after", "exp_avg"):
                for name, values in went_on[kind].items():
                    # Where a gradient is near 0, rounding may flip the sign of Adam's step: by 2·lr at most.
                    assert float((step[kind][name] - values).abs().mean()) <= 1e-6, (kind, name)


def _pass(engine: Engine, model_id: str) -> list[Tensor]:
    (outputs,) = engine.forward_backward(model_id, [SCORED])
    assert isinstance(outputs, list)
    return [torch.as_tensor(values) for output in outputs for values in output.logprobs]


def _load_over(engine: Engine, base: Path, folder: Path) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Logprobs of a trained model, and of another one before and after it has loaded the first one's checkpoint."""
    for model_id in ("first", "second"):
        engine.create(model_id, FullConfig())
    engine.forward_backward("first", [packed(*datums(layouts.LENGTHS, seed=1))])
    engine.optim_step("first", ADAM)
    saved = checkpoints.save(checkpoints.on(engine), "first", FullConfig(), folder, base, optimizer=False)
    before = _pass(engine, "second")
    engine.load("second", saved, False)
    return _pass(engine, "first"), before, _pass(engine, "second")


def test_a_model_under_fake_int4_computes_with_the_weights_that_it_has_loaded(
    world: World, tmp_path: Path
) -> None:
    here = layouts.folder(tmp_path, "dense")
    rounded = FakeInt4("rtn", ("model.layers.*.mlp.*",), 16)
    with world.opened(EngineConfig(here, Layout(), fake_int4=rounded)) as ranks:
        (found,) = ranks.call(_load_over, here, tmp_path / "saved")
    first, before, after = found
    assert not torch.equal(first[0], before[0])
    assert all(map(torch.equal, first, after))
