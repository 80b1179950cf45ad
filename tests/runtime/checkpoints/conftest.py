"""Saving and loading over real tables and folders; the ranks are a stand-in that writes what one rank would."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from actors import checkpoint_parts
from actors.checkpoint_parts import Part
from actors.contract import AdapterConfig, PassFailed, TenantConfig
from actors.group import MegatronGroup
from actors.models import tiny
from bus.connection import Bus, connect
from bus.embedded import EmbeddedBroker
from bus.events import Checkpoint, Failed, LoadWeights, Op, Outcome
from bus.lease import Lease
from bus.ledger import LedgerRow
from bus.log import LogEntry, OpsLog
from bus.tables import Tables
from runtime import entries
from runtime.checkpoints import manifest
from runtime.checkpoints.keeping import Keeping
from runtime.checkpoints.loading import Loading
from runtime.checkpoints.manifest import BaseModel
from runtime.checkpoints.saving import Base, Saving
from runtime.checkpoints.store import Store
from runtime.config import Settings
from runtime.hand_over import HandOver
from runtime.job import Job
from runtime.sequencer import Turn
from runtime.services import Services

ADAPTER = AdapterConfig(rank=4, alpha=32.0, seed=7)


class Ranks:
    """One rank whose weights are one number."""

    spec = None

    def __init__(self) -> None:
        self.value = 1.0
        self.error = ""
        """What goes wrong with writing, and with reading."""
        self.slow: set[str] = set()
        """Folders whose parts are still being written."""
        self.written: list[str] = []
        """Folders of parts, in the order of the saves."""
        self.loaded: list[tuple[str, Path, bool]] = []
        self.unloaded: list[str] = []

    async def save(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        self.written.append(str(folder))
        part = Part(tp_rank=0, steps=2, adam_steps=2)
        for kind in ("weight", *checkpoint_parts.MOMENTS) if optimizer else ("weight",):
            part.tensors[f"{kind}.x"] = torch.full((2, 2), self.value)
        checkpoint_parts.write(part, checkpoint_parts.file_in(folder, 0))

    async def saved(self, folder: Path) -> str | None:
        return None if str(folder) in self.slow else self.error

    async def load(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        if self.error:
            raise PassFailed(self.error)
        self.loaded.append((model_id, folder, optimizer))

    async def create_from(
        self, model_id: str, config: TenantConfig, folder: Path, *, optimizer: bool
    ) -> None:
        await self.load(model_id, folder, optimizer=optimizer)

    async def unload(self, model_id: str) -> None:
        self.unloaded.append(model_id)


class Started(MegatronGroup):
    """The stand-in's coroutines as tasks, as a group gives them."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.spec = None  # type: ignore[assignment]

    def __getattribute__(self, name: str) -> Any:
        if name in ("save", "saved", "load", "create_from", "unload"):
            method = getattr(self.ranks, name)
            return lambda *args, **kwargs: asyncio.ensure_future(method(*args, **kwargs))
        return super().__getattribute__(name)


class Life:
    """One life of a dispatcher, as far as checkpoints are concerned, with a live model."""

    def __init__(self, tables: Tables, bus: Bus, folder: Path, model_id: str) -> None:
        self.tables, self.model_id = tables, model_id
        self.ranks = Ranks()
        self.store = Store(str(folder / "checkpoints"), folder / "saving")
        services = cast(Services, SimpleNamespace(settings=Settings(), tables=tables))
        lease = cast(Lease, SimpleNamespace(confirm=_kept))
        base = Base(
            folder, "org/base", BaseModel(name="tiny", files="f00", shape=manifest.shape(tiny.spec()))
        )
        group = Started(self.ranks)
        saving = Saving(services, lease, group, self.store, base)
        self.loading = Loading(services, self.store, base.identity, saving)
        self.keeping = Keeping(services, lease, self.store)
        self.told: tuple[LedgerRow, Outcome] | None = None
        self.hand_over = HandOver(
            Settings(), group, OpsLog(bus, "main").whole, self._told, saving, self.loading
        )
        self.hand_over.resume(model_id, ADAPTER)

    async def _told(self, _: LogEntry) -> tuple[LedgerRow, Outcome] | None:
        return self.told

    async def begin(self, op: Op, seq_id: int, *, tenant: str = "demo", model_id: str | None = None) -> Job:
        """Its turn, up to where the ranks go on."""
        entry = entries.of_op(tenant, model_id or self.model_id, seq_id, op)
        object.__setattr__(entry, "position", seq_id + 1)
        job = Job(entry, entry.verb, time.monotonic(), time.monotonic())
        await self.hand_over.begin(job, Turn(entry))
        return job

    async def run(self, op: Op, seq_id: int, **where: Any) -> Outcome:
        return await finished(await self.begin(op, seq_id, **where))

    async def load(self, path: str, seq_id: int = 50, **where: Any) -> Outcome:
        optimizer = where.pop("optimizer", False)
        return await self.run(
            LoadWeights(checkpoint=Checkpoint(path=path, optimizer=optimizer)), seq_id, **where
        )


async def finished(job: Job) -> Outcome:
    """As the pipeline finishes it."""
    if job.ranks is not None:
        await job.ranks
    if job.outcome is None:
        assert job.after is not None
        job.outcome = await job.after()
    return job.outcome


def failed(outcome: Outcome) -> Failed:
    assert isinstance(outcome, Failed), outcome
    return outcome


async def _kept() -> None:
    """The lease is ours."""


@pytest.fixture
async def life(broker: EmbeddedBroker, tmp_path: Path) -> AsyncIterator[Life]:
    async with await connect(broker.url, broker.credentials, name="test") as bus:
        yield Life(await Tables.open(bus), bus, tmp_path, f"run:{secrets.token_hex(4)}")
