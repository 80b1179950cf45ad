"""Tenants side by side, in memory or put away: each trains as if it were alone, and takes the memory it needs."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from actors.contract import AdapterConfig, EngineConfig, FullConfig, TenantConfig
from actors.engine import Engine
from actors.layout import Layout
from actors.packing import PackingConfig
from actors.residency import Residency
from bus.events import AdamParams
from tests.support import dumps, layouts
from tests.support.models import assert_same_bits
from tests.support.requests import datums, packed
from tests.support.world import Ranks, World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TENANTS: dict[str, TenantConfig] = {
    "rank-4": AdapterConfig(rank=4, alpha=32, seed=1),
    "rank-8": AdapterConfig(rank=8, alpha=32, seed=2, train_unembed=False),
    "rank-16": AdapterConfig(rank=16, alpha=32, seed=3, train_mlp=False),
}
STEPS = 10
"""Of each of them: 30 in all."""
Operation = tuple[str, str, int]
"""(verb, tenant, number of the request)"""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(2) as world:
        yield world


def operations(tenants: list[str]) -> dict[str, list[Operation]]:
    """Each tenant's own: windows of one to three calls and a step, now and then a forward, once an empty step."""
    own: dict[str, list[Operation]] = {}
    for which, tenant in enumerate(tenants):
        chance = random.Random(which)
        mine: list[Operation] = []
        for step in range(STEPS):
            calls = 0 if step == 4 else chance.randint(1, 3)
            mine += [("forward_backward", tenant, 100 * step + call) for call in range(calls)]
            if chance.random() < 0.3:
                mine.insert(-1, ("forward", tenant, 100 * step))
            mine.append(("optim_step", tenant, step))
        own[tenant] = mine
    return own


def interleaved(own: dict[str, list[Operation]], seed: int) -> list[Operation]:
    """All of them, each tenant's in its order."""
    chance = random.Random(seed)
    left = {tenant: list(mine) for tenant, mine in own.items()}
    found = []
    while left:
        tenant = chance.choice(sorted(left))
        found.append(left[tenant].pop(0))
        if not left[tenant]:
            del left[tenant]
    return found


def _run(engine: Engine, tenants: dict[str, TenantConfig], todo: list[Operation]) -> int:
    """Run them; the most tenants that were in memory."""
    most = 0
    for tenant, config in tenants.items():
        engine.create(tenant, config)
    for verb, tenant, number in todo:
        if verb == "optim_step":
            engine.optim_step(
                tenant, AdamParams(learning_rate=1e-3, grad_clip_norm=1.0 if number % 2 else 0.0)
            )
        else:
            tokens, inputs = datums((3 + number % 5, 7), seed=number)
            request = packed(tokens, inputs, packing=PackingConfig(), forward_only=verb == "forward")
            (answer,) = engine.forward_backward(tenant, [request])
            assert isinstance(answer, list), answer
        most = max(most, engine.tenants.in_memory())
    return most


def end(ranks: Ranks, tenants: dict[str, TenantConfig], todo: list[Operation]) -> tuple[int, Any]:
    most = ranks.call(_run, tenants, todo)[0]
    return most, ranks.config.dump_gradients


def last_step(folder: Path, tenant: str) -> dict[str, Tensor]:
    return {
        f"{kind}.{name}": tensor
        for kind, tensors in dumps.read(folder, tenant, STEPS - 1).items()
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize(
    ("layout", "with_full"),
    [
        (Layout(dp=2, distributed_optimizer=True), False),
        (Layout(tp=2, sequence_parallel=True), True),
    ],
    ids=["DP2-distributed", "TP2"],
)
def test_tenants_side_by_side_end_with_the_bits_of_runs_alone(
    world: World, tmp_path: Path, layout: Layout, with_full: bool
) -> None:
    folder = layouts.folder(tmp_path, "dense")
    tenants = {**TENANTS, "full": FullConfig()} if with_full else TENANTS
    own = operations(list(tenants))

    def config(name: str, **changes: Any) -> EngineConfig:
        return EngineConfig(folder, layout, dump_gradients=tmp_path / name, **changes)

    for tenant in tenants:
        with world.opened(config("alone")) as ranks:
            end(ranks, {tenant: tenants[tenant]}, own[tenant])
    with world.opened(config("two", max_resident_models=2, away=tmp_path / "away")) as ranks:
        in_memory, _ = end(ranks, tenants, interleaved(own, seed=5))
    assert in_memory == 2
    for tenant in tenants:
        assert_same_bits(last_step(tmp_path / "two", tenant), last_step(tmp_path / "alone", tenant))


def test_a_limit_needs_a_place_for_the_others() -> None:
    with pytest.raises(ValueError, match="needs a folder"):
        Residency(None, 2, None)  # type: ignore[arg-type]


MEMORY = """
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from actors import engine
from actors.contract import AdapterConfig, EngineConfig
from bus.events import AdamParams
from tests.support.requests import datums, packed


def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) * 1024


torch.set_num_threads(1)
with engine.opened(EngineConfig(Path(sys.argv[1])), 0, dist.HashStore()) as opened:
    request = packed(*datums((16, 16)))
    for number in range(22):
        if number == 2:  # what comes once has come
            before = resident()
        opened.create(f"m{number}", AdapterConfig(rank=128, alpha=32, seed=number))
        opened.forward_backward(f"m{number}", [request])
        opened.optim_step(f"m{number}", AdamParams(learning_rate=1e-3))
    one = sum(p.numel() for module in opened.tenants.activate("m0").trained for p in module.parameters())
    print(resident() - before, one)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc to read memory")
def test_a_tenant_takes_16_bytes_a_trained_parameter(tiny_folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEMORY, str(tiny_folder)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    grown, parameters = map(int, done.stdout.split())
    linears = ((256, 256), (256, 128), (256, 128), (256, 256), (256, 768), (256, 768), (768, 256))
    assert parameters == 128 * (4 * sum(i + o for i, o in linears) + 256 + 320)
    assert grown == pytest.approx(20 * 16 * parameters, rel=0.15)
