"""From the ranks' memory to a checkpoint that is listed.

The ranks copy what they hold when the save has its turn, and go on; a thread of each writes its part, one here puts the
parts together, and the row comes last: it alone makes the checkpoint one. Saves of a model are listed in the order of
their turns. A save whose row stands already is not repeated.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from actors.checkpoint_files import assemble
from actors.contract import TenantConfig
from actors.group import GroupDied, MegatronGroup
from bus.events import Outcome, SaveWeights, SaveWeightsExternal, SaveWeightsForSampler
from bus.lease import Lease, LeaseLost
from bus.log import LogEntry
from bus.tables import CheckpointKind, CheckpointRow, SamplerRow
from runtime import outcomes
from runtime.checkpoints import manifest
from runtime.checkpoints.manifest import BaseModel, Manifest
from runtime.checkpoints.paths import CheckpointPath, wrong_name
from runtime.checkpoints.store import Draft, Store
from runtime.checks import Refusal
from runtime.job import Job
from runtime.services import Services, patiently

log = logging.getLogger(__name__)

Save = SaveWeights | SaveWeightsForSampler | SaveWeightsExternal
LOOK_EVERY_S = 0.05
MAX_TTL_S = 10 * 365 * 86400


@dataclass(frozen=True, slots=True)
class Base:
    """The base model that adapters belong to."""

    folder: Path
    name: str
    """As an exported adapter names it."""
    identity: BaseModel


@dataclass(frozen=True, slots=True)
class Target:
    """What one operation asks to be saved, and under which name."""

    kind: CheckpointKind
    name: str | None
    """None for weights of a sampling session."""
    session_id: str | None = None
    inflight: bool = False
    overwrite: bool = False
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None

    @property
    def optimizer(self) -> bool:
        return self.kind == "weights"


def target_of(op: Save) -> Target:
    """Raises Refusal."""
    match op:
        case SaveWeights():
            target = Target(
                "weights",
                op.name,
                overwrite=op.overwrite,
                ttl_seconds=op.ttl_seconds,
                user_metadata=op.user_metadata,
            )
        case SaveWeightsExternal():
            target = Target("external_weights", op.name, ttl_seconds=op.ttl_seconds)
        case SaveWeightsForSampler():
            if (op.name is None) == (op.sampling_session_id is None):
                raise Refusal("give either a name or a sampling_session_id, not both and not neither", "name")
            if op.inflight and op.name is not None:
                raise Refusal("inflight weights have no name of their own", "inflight")
            target = Target(
                "sampler_weights",
                op.name,
                op.sampling_session_id,
                op.inflight,
                ttl_seconds=op.ttl_seconds,
                user_metadata=op.user_metadata,
            )
    if target.name is not None and (wrong := wrong_name(target.name)):
        raise Refusal(wrong, "name")
    if target.ttl_seconds is not None and not 1 <= target.ttl_seconds <= MAX_TTL_S:
        raise Refusal(
            f"ttl_seconds is {target.ttl_seconds}; it must be between 1 and {MAX_TTL_S}", "ttl_seconds"
        )
    return target


def expired(row: CheckpointRow, now: float) -> bool:
    """From then on it counts as deleted."""
    return row.expires_at is not None and row.expires_at <= now


class Saving:
    """Of one life of a group."""

    def __init__(
        self, services: Services, lease: Lease, group: MegatronGroup, store: Store, base: Base
    ) -> None:
        self._s = services
        self._lease = lease
        self._group = group
        self._store = store
        self._base = base
        self._newest: dict[str, asyncio.Event] = {}
        """Per model: set once the newest of its saves is over."""

    async def over(self, model_id: str) -> None:
        """Every save of the model that has had its turn is listed, or never will be."""
        if (newest := self._newest.get(model_id)) is not None:
            await newest.wait()

    async def begin(
        self, job: Job, op: Save, config: TenantConfig, at_ranks: Callable[[], MegatronGroup]
    ) -> None:
        """Set the job's outcome, or have the ranks copy what they hold now. Raises Refusal.

        `at_ranks` gives the group once everything before this is on its way there.
        """
        entry, target = job.entry, target_of(op)
        assert entry.seq_id is not None
        if (known := await self._is_there(entry, target)) is not None:
            job.outcome = known
            return
        name = target.name if target.name is not None else f"session {target.session_id}"
        try:
            draft = await asyncio.to_thread(
                self._store.begin, entry.model_id, target.kind, _short(name), entry.seq_id
            )
        except Exception as error:  # OSError, or whatever the file system of the URL raises
            job.outcome = self._not_saved(entry, error)
            return
        job.ranks = at_ranks().save(entry.model_id, draft.parts, optimizer=target.optimizer)
        before, over = self._newest.get(entry.model_id), asyncio.Event()
        self._newest[entry.model_id] = over
        job.after = partial(self._finish, entry, draft, target, config, before, over)

    async def _is_there(self, entry: LogEntry, target: Target) -> Outcome | None:
        """What can be said before anything is written: it was saved already, or the name is taken."""
        if target.name is None:
            assert target.session_id is not None
            session = await self._session(target.session_id)
            return None if session is None else self._session_taken(session, entry, target)
        path = CheckpointPath(entry.model_id, target.kind, target.name)
        found = await patiently(lambda: self._s.tables.checkpoints.get(path.key))
        if found is None or (found[0].seq_id != entry.seq_id and _may_go(found[0], target)):
            return None
        return _taken(path, found[0], entry)

    async def _finish(
        self,
        entry: LogEntry,
        draft: Draft,
        target: Target,
        config: TenantConfig,
        before: asyncio.Event | None,
        over: asyncio.Event,
    ) -> Outcome:
        try:
            if error := await self._written(draft.parts):
                raise OSError(error)  # noqa: TRY301 - as if it had been raised here
            size = await asyncio.to_thread(self._make, entry, draft, target, config)
            if before is not None:
                await before.wait()
            await self._lease.confirm()
            outcome, listed = await self._list(entry, draft, target, config, size)
        except (GroupDied, LeaseLost):
            raise
        except Exception as error:
            await asyncio.to_thread(self._store.abandon, draft)
            return self._not_saved(entry, error)
        finally:
            over.set()
            if self._newest.get(entry.model_id) is over:
                del self._newest[entry.model_id]
        if listed:
            self._store.close(draft)
        else:
            await asyncio.to_thread(self._store.abandon, draft)
        return outcome

    async def _written(self, parts: Path) -> str:
        """ "" once every rank's part is on the disk, else what went wrong."""
        while True:
            outcome = await self._group.saved(parts)
            if outcome is not None:
                return outcome
            await asyncio.sleep(LOOK_EVERY_S)

    def _make(self, entry: LogEntry, draft: Draft, target: Target, config: TenantConfig) -> int:
        assert entry.seq_id is not None
        assemble(
            draft.parts,
            draft.folder,
            config,
            base=self._base.folder,
            base_model=self._base.name,
            optimizer=target.optimizer,
        )
        about = Manifest(
            model_id=entry.model_id,
            seq_id=entry.seq_id,
            kind=target.kind,
            name=target.name,
            base=self._base.identity,
            adapter=manifest.adapter(config),
            optimizer=target.optimizer,
        )
        return self._store.finish(draft, about)

    async def _list(
        self, entry: LogEntry, draft: Draft, target: Target, config: TenantConfig, size: int
    ) -> tuple[Outcome, bool]:
        """Write the row; the outcome, and whether the draft is what is listed now."""
        if target.name is None:
            return await self._open_session(entry, draft, target, config)
        assert entry.seq_id is not None
        path, now = CheckpointPath(entry.model_id, target.kind, target.name), time.time()
        row = CheckpointRow(
            tenant=entry.tenant,
            seq_id=entry.seq_id,
            url=draft.url,
            base_model=self._base.identity.name,
            created_at=now,
            size_bytes=size,
            lora=manifest.lora(config),
            optimizer=target.optimizer,
            expires_at=None if target.ttl_seconds is None else now + target.ttl_seconds,
            user_metadata=target.user_metadata or {},
        )
        table = self._s.tables.checkpoints
        while not await patiently(lambda: table.create(path.key, row)):
            found = await patiently(lambda: table.get(path.key))
            if found is None:
                continue
            old, revision = found
            if old.seq_id == entry.seq_id or not _may_go(old, target):
                return _taken(path, old, entry), False
            if await patiently(lambda r=revision: table.update(path.key, row, r)) is not None:  # type: ignore[misc]
                await self._remove(old.url)
                break
        return outcomes.saved(str(path), size), True

    async def _open_session(
        self, entry: LogEntry, draft: Draft, target: Target, config: TenantConfig
    ) -> tuple[Outcome, bool]:
        assert target.session_id is not None
        model = await patiently(lambda: self._s.tables.models.get(entry.model_id))
        row = SamplerRow(
            tenant=entry.tenant,
            base_model=self._base.identity.name,
            created_at=time.time(),
            session_id=model[0].session_id if model is not None else None,
            url=draft.url,
            lora=manifest.lora(config),
            model_id=entry.model_id,
            seq_id=entry.seq_id,
            inflight=target.inflight,
        )
        table, session_id = self._s.tables.samplers, target.session_id
        if not await patiently(lambda: table.create(session_id, row)):
            found = await self._session(session_id)
            if found is not None:
                return self._session_taken(found, entry, target), False
        if target.inflight:
            await patiently(lambda: self._update_others(entry.model_id, session_id, draft.url))
        return outcomes.session_opened(session_id), True

    async def _update_others(self, model_id: str, session_id: str, url: str) -> None:
        """Every other inflight session of the model goes on with the new weights."""

        def changed(row: SamplerRow) -> SamplerRow:
            if row.url == url:
                return row
            return msgspec.structs.replace(row, url=url, generation=row.generation + 1)

        for key, row in (await self._s.tables.samplers.all()).items():
            if row.inflight and row.model_id == model_id and key != session_id:
                await self._s.tables.samplers.change(key, changed)

    async def _session(self, session_id: str) -> SamplerRow | None:
        found = await patiently(lambda: self._s.tables.samplers.get(session_id))
        return None if found is None else found[0]

    @staticmethod
    def _session_taken(row: SamplerRow, entry: LogEntry, target: Target) -> Outcome:
        assert target.session_id is not None
        if (row.model_id, row.seq_id) == (entry.model_id, entry.seq_id):
            return outcomes.session_opened(target.session_id)
        return outcomes.name_taken(
            f"sampling_session_id {target.session_id!r} is taken: choose another", "sampling_session_id"
        )

    async def _remove(self, url: str) -> None:
        """What is replaced goes; where that fails, it is found as unlisted later."""
        try:
            await asyncio.to_thread(self._store.remove, url)
        except Exception as error:  # whatever the file system of the URL raises
            log.warning("the folder %s could not be removed yet: %s", url, error)

    def _not_saved(self, entry: LogEntry, error: Exception) -> Outcome:
        log.error("the save %s failed: %s", entry.request_id, error)
        return outcomes.not_saved(error)


def _may_go(row: CheckpointRow, target: Target) -> bool:
    return target.overwrite or expired(row, time.time())


def _taken(path: CheckpointPath, row: CheckpointRow, entry: LogEntry) -> Outcome:
    """The outcome of a save whose name has a row: done by this very operation, or refused."""
    if row.seq_id == entry.seq_id:
        return outcomes.saved(str(path), row.size_bytes)
    remedy = "save with overwrite=True, or under" if path.kind == "weights" else "delete it, or choose"
    return outcomes.name_taken(f"{path} is there already: {remedy} another name", "name")


def _short(name: str) -> str:
    """Of a session, as a folder's name may be."""
    return name if wrong_name(name) is None else name[:40].replace("/", " ")
