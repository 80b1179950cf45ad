"""The dispatcher of one group: starts the ranks, works the log, and starts anew when a rank is lost.

State is snapshots and log: every life of the group begins with the newest snapshots and a replay of what came since.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from importlib.metadata import version
from pathlib import Path

import msgspec

from actors.contract import EngineConfig
from actors.group import GroupConfig, GroupDied, MegatronGroup
from actors.models.families import spec_of
from bus.errors import BrokerError, NewerFormat
from bus.lease import Lease
from bus.log import LogEntry
from bus.tables import GroupRow
from runtime import base_model, fingerprint
from runtime.checkpoints import manifest, store
from runtime.checkpoints.manifest import BaseModel
from runtime.checkpoints.saving import Base
from runtime.config import Settings
from runtime.fingerprint import FingerprintDiffers
from runtime.hand_over import packing
from runtime.pipeline import Pipeline
from runtime.services import Services, patiently
from runtime.settling import give_up
from runtime.snapshots import Snapshots

log = logging.getLogger(__name__)

REBUILD_PAUSE_S = 1.0


def group_config(settings: Settings, folder: Path, *, gpus: bool) -> GroupConfig:
    dump = settings.debug.dump_gradients
    return GroupConfig(
        engine=EngineConfig(
            model_folder=folder,
            layout=base_model.layout(settings),
            dump_gradients=Path(dump).resolve() if dump else None,
            dtype=settings.dtype,
            fused_head=settings.head.fused,
            fake_int4=base_model.fake_int4(settings),
            max_resident_models=settings.limits.max_resident_models,
            away=Path(settings.data).resolve() / "away",
        ),
        threads_per_rank=settings.layout.threads(),
        heartbeat_timeout_s=settings.recovery.heartbeat_timeout_s,
        gpus=gpus,
    )


def _base(settings: Settings, folder: Path) -> Base:
    """What checkpoints are of. An adapter names what the operator calls the model, or else where it lies."""
    identity = BaseModel(
        name=settings.served_name,
        files=fingerprint.model_files(folder),
        shape=manifest.shape(spec_of(folder)),
    )
    return Base(folder, settings.model_name or str(folder), identity)


class Dispatcher:
    """See the module. `run` goes on until it is cancelled."""

    def __init__(self, services: Services, group_name: str, folder: Path, config: GroupConfig) -> None:
        self._s = services
        self._name = group_name
        self._config = config
        settings = services.settings
        self._snapshots = Path(settings.data).resolve() / "snapshots" / group_name
        self._fingerprint = fingerprint.fingerprint(config, packing(settings))
        self._base = _base(settings, folder)
        self._pipeline: Pipeline | None = None
        self._tries: dict[str, int] = {}
        spec = spec_of(folder)
        self._row = GroupRow(
            status="starting",
            base_model=services.settings.served_name,
            model_dir=str(folder),
            context_length=spec.context_length,
            vocab_size=spec.vocab_size,
            arch=spec.family,
        )
        services.recorder.set("tinkerbus_build_info", 1, version=version("tinkerbus"))
        services.recorder.before_snapshot(self._gauges)

    async def run(self, lease: Lease) -> None:
        """Life after life of the group, for as long as the lease is ours and kept.

        Raises LeaseLost; FingerprintDiffers and NewerFormat where there are snapshots that this service must not use.
        """
        log.info("acting for group %s with epoch %d", self._name, lease.epoch)
        died_before = False
        recovers = bool(lease.predecessor)
        while True:
            group: MegatronGroup | None = None
            pipeline: Pipeline | None = None
            try:
                await self._say("rebuilding" if recovers else "starting")
                if recovers:
                    self._s.recorder.inc("tinkerbus_recoveries_total")
                group = await MegatronGroup.start(self._config)
                await lease.confirm()
                kept = await asyncio.to_thread(Snapshots, self._snapshots)
                checkpoints = await asyncio.to_thread(store.of_service, self._s.settings)
                pipeline = Pipeline(
                    self._s,
                    lease,
                    group,
                    kept,
                    self._fingerprint,
                    checkpoints,
                    self._base,
                    cautious=died_before,
                )
                await self._live(pipeline)
            except GroupDied as died:
                died_before = recovers = True
                log.warning("%s; building the group anew and replaying the log", died)
                self._s.recorder.set("tinkerbus_ranks_alive", 0)
                await lease.confirm()
                if pipeline is not None and pipeline.cautious and pipeline.suspect is not None:
                    await self._blame(pipeline.suspect)
                await asyncio.sleep(REBUILD_PAUSE_S)
            except (FingerprintDiffers, NewerFormat) as refusal:
                await self._say("refused", detail=str(refusal))
                raise
            except asyncio.CancelledError:
                with contextlib.suppress(
                    BrokerError
                ):  # stopped in an orderly way: whoever is next need not wait
                    await lease.release()
                raise
            finally:
                if group is not None:
                    group.close()

    async def _blame(self, entry: LogEntry) -> None:
        """The ranks died while the operation ran alone: after some times, it is given up and the model goes on."""
        name, tries = entry.request_id, self._tries
        tries[name] = tries.get(name, 0) + 1
        if tries[name] >= self._s.settings.recovery.tries:
            log.error("giving up %s, which took the ranks down %d times", name, tries[name])
            await give_up(self._s, entry, tries[name])

    async def _live(self, pipeline: Pipeline) -> None:
        self._s.recorder.set("tinkerbus_ranks_alive", self._config.engine.layout.world_size)
        self._pipeline = pipeline
        ready = asyncio.create_task(self._say_when_ready(pipeline))
        try:
            await pipeline.run()
        finally:
            ready.cancel()
            self._pipeline = None

    async def _say_when_ready(self, pipeline: Pipeline) -> None:
        await pipeline.caught_up.wait()
        await self._say("ready", pipeline.position)

    async def _say(self, status: str, position: int = 0, detail: str | None = None) -> None:
        row = msgspec.structs.replace(self._row, status=status, position=position, detail=detail)
        await patiently(lambda: self._s.tables.groups.put(self._name, row))

    def _gauges(self) -> None:
        """What is read off rather than counted."""
        if self._pipeline is None:
            return
        recorder, now = self._s.recorder, time.monotonic()
        recorder.set("tinkerbus_log_position", self._pipeline.position)
        recorder.set("tinkerbus_log_lag", max(0, self._pipeline.end_of_log - self._pipeline.position))
        for model_id, accepted in self._pipeline.unfinished().items():
            recorder.set("tinkerbus_queue_depth", len(accepted), model=model_id)
            oldest = now - min(accepted) if accepted else 0.0
            recorder.set("tinkerbus_queue_oldest_age_seconds", oldest, model=model_id)
