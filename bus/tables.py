"""Key-value tables that every server shares: a row per key, each with the revision it was written at.

A key is an id, or several (`("run-1", "4")`), escaped into subject tokens. A row is a msgspec struct in msgpack;
fields it does not know are ignored, so that older and newer servers can share a table.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Generic, Literal, TypeAlias, TypeVar

import msgspec
import nats.errors
import nats.js.errors
from nats.js import api

from bus import scan, subjects
from bus.connection import Bus
from bus.events import LoraConfig
from bus.publish import SubjectTaken, store

Key: TypeAlias = str | tuple[str, ...]

MODELS = "tinker_models"

ROOM = 200
"""What a read's own subject has before the row's."""

_OPERATION = "KV-Operation"
_TIMEOUT_S = 10.0


class SessionRow(msgspec.Struct, frozen=True, kw_only=True):
    tenant: str
    created_at: float
    """Seconds since 1970."""
    status: Literal["live", "finished"] = "live"
    tags: tuple[str, ...] = ()
    user_metadata: dict[str, str] = {}
    display_name: str | None = None
    sdk_version: str | None = None
    reason: Literal["success", "errored", "interrupted", "expired"] | None = None
    """Why it is finished: what its client said, or that its heartbeats had stopped."""
    detail: str | None = None
    """What its client said beside the reason."""


class HeartbeatRow(msgspec.Struct, frozen=True, kw_only=True):
    """A session's client is there; by session id. That the row was written counts, not what it says."""


class ModelRow(msgspec.Struct, frozen=True, kw_only=True):
    tenant: str
    base_model: str
    created_at: float
    """Seconds since 1970."""
    session_id: str | None = None
    """None for a model of an event client."""
    lora: LoraConfig | None = None
    """None for full-parameter training."""
    user_metadata: dict[str, str] = {}
    status: Literal["creating", "live", "failed", "unloaded"] = "creating"
    trimmed_below: int = 0
    """Operations with lower numbers may be gone from the log; the ledger has them."""
    copy: bool = False
    """Whether it is only the run of a copied checkpoint, which takes no operations."""


CheckpointKind: TypeAlias = Literal["weights", "sampler_weights", "external_weights"]
"""As the second part of a `tinker://` path says it."""


class CheckpointRow(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that is whole; by (model_id, kind, name). Nothing that has no row here is listed or loaded."""

    tenant: str
    seq_id: int
    """Of the operation that saved it."""
    url: str
    """Of its folder, which no other checkpoint ever had: an fsspec URL."""
    base_model: str
    created_at: float
    """Seconds since 1970."""
    size_bytes: int
    lora: LoraConfig | None = None
    """None for a model that trained every parameter."""
    optimizer: bool = False
    """Whether it holds the optimizer's state."""
    expires_at: float | None = None
    """Seconds since 1970; from then on it counts as deleted. None keeps it."""
    public: bool = False
    """Whether every tenant may load it."""
    user_metadata: dict[str, str] = {}


class SamplerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A sampling session; by its id."""

    tenant: str
    base_model: str
    created_at: float
    """Seconds since 1970."""
    session_id: str | None = None
    model_path: str | None = None
    """`tinker://…` of the weights; None for the base model's, and for weights without a name."""
    url: str | None = None
    """Of their folder, a PEFT adapter or a whole model: an fsspec URL. None for the base model's."""
    lora: LoraConfig | None = None
    generation: int = 0
    """Grows when the weights of an inflight sampler change."""
    model_id: str | None = None
    """Of the model whose weights were saved for this session alone; None for all others."""
    seq_id: int | None = None
    """Of the operation that saved them."""
    inflight: bool = False
    """Whether it goes on with the weights of the model's later inflight saves."""
    clones: int = 0
    """Clients that have joined beside the one that made it."""


class SampleRow(msgspec.Struct, frozen=True, kw_only=True):
    """A sampling request that a sampler process has taken and not answered yet; by (sampling_session_id, seq_id)."""

    tenant: str
    process: str
    """Of the sampler: what it listens for under `subjects.sampler_process`. When it is gone, so is the request."""


class GroupRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a group's dispatcher says of itself; by group name."""

    status: Literal["starting", "ready", "rebuilding", "refused", "stopped"]
    base_model: str
    """The name it is served under."""
    model_dir: str
    """The base model's folder, with its tokenizer."""
    context_length: int
    """Tokens in one datum, at most."""
    vocab_size: int
    arch: str | None = None
    """The model family, as its Hugging Face config names it."""
    position: int = 0
    """The log has been worked through up to here."""
    detail: str | None = None
    """Why the group refuses to start."""


class BacklogRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a group's dispatcher says of operations that have no result yet; by group name."""

    position: int = 0
    """The log up to here is counted."""
    models: dict[str, tuple[int, int]] = {}
    """Operations and their bytes, per model that has any."""


T = TypeVar("T", bound=msgspec.Struct)


class Table(Generic[T]):
    """One bucket. Made by `open_table`.

    Every method raises BrokerUnreachable once ten seconds have gone by without an answer; what writes raises
    StreamFull where the broker has no room.
    """

    def __init__(self, bus: Bus, name: str, row_type: type[T]) -> None:
        self._bus = bus
        self.name = name
        self._stream = f"KV_{name}"
        self._prefix = f"$KV.{name}."
        self._decoder = msgspec.msgpack.Decoder(row_type)
        self._encoder = msgspec.msgpack.Encoder()

    async def get(self, key: Key) -> tuple[T, int] | None:
        """(row, revision), or None where the key is free."""
        subject = self._subject(key)
        if len(subject) > subjects.LONGEST_SUBJECT - ROOM:
            return None  # nothing can have been written there
        found = await scan.last_of(self._bus, self._stream, subject)
        if found is None or _OPERATION in found.headers:
            return None
        return self._decoder.decode(found.data), found.position

    async def create(self, key: Key, value: T) -> bool:
        """False when the key is taken."""
        if await self._write(key, value, 0) is not None:
            return True
        found = await scan.last_of(self._bus, self._stream, self._subject(key))
        if found is None or _OPERATION not in found.headers:
            return False
        return await self._write(key, value, found.position) is not None

    async def put(self, key: Key, value: T) -> int:
        """Write whatever was there before; the new revision."""
        revision = await self._write(key, value, None)
        assert revision is not None
        return revision

    async def update(self, key: Key, value: T, revision: int) -> int | None:
        """The new revision, or None when the row is no longer at `revision`."""
        return await self._write(key, value, revision)

    async def change(self, key: Key, changed: Callable[[T], T]) -> None:
        """Write `changed(row)`, whoever else writes meanwhile. Nothing happens where there is no row, or no change."""
        while (found := await self.get(key)) is not None:
            row, revision = found
            new = changed(row)
            if new == row or await self.update(key, new, revision) is not None:
                return

    async def delete(self, key: Key, revision: int | None = None) -> bool:
        """False when the row is no longer at `revision`; None drops whatever is there."""
        try:
            await self._store(self._subject(key), b"", {_OPERATION: "DEL"}, revision)
        except SubjectTaken as taken:
            return taken.asked_before and await self.get(key) is None
        return True

    async def last_time(self, prefix: Key) -> float | None:
        """When a row whose key begins with the ids in `prefix` was last written, in whole seconds since 1970."""
        return await scan.last_time(self._bus, self._stream, f"{self._subject(prefix)}.>")

    async def forget(self, key: Key) -> None:
        """Drop one row without a trace."""
        await scan.purge(self._bus, self._stream, self._subject(key))

    async def purge(self, prefix: Key) -> None:
        """Drop every row whose key begins with the ids in `prefix`, without a trace."""
        await scan.purge(self._bus, self._stream, f"{self._subject(prefix)}.>")

    async def keys(self, prefix: Key | None = None) -> list[Key]:
        """Every key, or those that begin with the ids in `prefix`, in the order in which they were last written."""
        return [key async for key, _, _ in self._rows(prefix)]

    async def all(self, prefix: Key | None = None) -> dict[Key, T]:
        """Every row, or those whose keys begin with the ids in `prefix`."""
        return {key: row async for key, row, _ in self._rows(prefix)}

    async def since(self, position: int) -> tuple[dict[Key, T | None], int]:
        """Every row written after `position`, None for one that was deleted, and the position to go on from."""
        changed: dict[Key, T | None] = {}
        while found := await scan.batch(self._bus, self._stream, f"{self._prefix}>", position + 1):
            for message in found:
                position = message.position
                deleted = _OPERATION in message.headers
                changed[self._key(message.subject)] = None if deleted else self._decoder.decode(message.data)
        return changed, position

    async def _rows(self, prefix: Key | None) -> AsyncIterator[tuple[Key, T, int]]:
        pattern = f"{self._prefix}>" if prefix is None else f"{self._subject(prefix)}.>"
        position = 1
        while found := await scan.batch(self._bus, self._stream, pattern, position):
            for message in found:
                position = message.position + 1
                if _OPERATION not in message.headers:
                    yield self._key(message.subject), self._decoder.decode(message.data), message.position

    async def _write(self, key: Key, value: T, revision: int | None) -> int | None:
        """The new revision, or None when the row was not at `revision`."""
        subject, body = self._subject(key), self._encoder.encode(value)
        try:
            return await self._store(subject, body, {}, revision)
        except SubjectTaken as taken:
            if taken.asked_before:
                found = await scan.last_of(self._bus, self._stream, subject)
                if found is not None and found.data == body:
                    return found.position
            return None

    async def _store(self, subject: str, body: bytes, headers: dict[str, str], revision: int | None) -> int:
        return await store(
            self._bus,
            subject,
            body,
            headers,
            doing=f"a row of table {self.name}",
            expected_revision=revision,
            timeout_s=_TIMEOUT_S,
        )

    def _subject(self, key: Key) -> str:
        ids = (key,) if isinstance(key, str) else key
        return self._prefix + ".".join(map(subjects.escape, ids))

    def _key(self, subject: str) -> Key:
        ids = tuple(map(subjects.unescape, subject.removeprefix(self._prefix).split(".")))
        return ids[0] if len(ids) == 1 else ids


async def open_table(
    bus: Bus,
    name: str,
    row_type: type[T],
    *,
    replicas: int = 1,
    durable: bool = True,
    ttl_s: float | None = None,
) -> Table[T]:
    """The table over bucket `name`, which is created when it is missing. `ttl_s` is the age at which a row goes."""
    storage = api.StorageType.FILE if durable else api.StorageType.MEMORY
    config = api.KeyValueConfig(
        bucket=name, history=1, storage=storage, direct=True, replicas=replicas, ttl=ttl_s
    )
    try:
        await bus.js.create_key_value(config)
    except nats.js.errors.APIError as error:
        raise bus.refusal(f"table {name}", error) from None
    except (nats.errors.Error, TimeoutError) as error:
        raise bus.unreachable(f"opening table {name}", error) from None
    return Table(bus, name, row_type)


async def existing_table(bus: Bus, name: str, row_type: type[T]) -> Table[T] | None:
    """The table over bucket `name`, or None while nobody has made it: for who only looks."""
    return Table(bus, name, row_type) if await scan.exists(bus, f"KV_{name}") else None


class Tables:
    """The tables of the service. `await Tables.open(bus)`."""

    def __init__(
        self,
        sessions: Table[SessionRow],
        models: Table[ModelRow],
        groups: Table[GroupRow],
        backlogs: Table[BacklogRow],
        checkpoints: Table[CheckpointRow],
        samplers: Table[SamplerRow],
        heartbeats: Table[HeartbeatRow],
        samples: Table[SampleRow],
    ) -> None:
        self.sessions = sessions
        self.models = models
        self.groups = groups
        self.backlogs = backlogs
        self.checkpoints = checkpoints
        self.samplers = samplers
        self.heartbeats = heartbeats
        self.samples = samples
        """In the broker's memory: none of these requests outlives its sampler, nor need it outlive the broker."""

    @classmethod
    async def open(cls, bus: Bus, *, replicas: int = 1) -> Tables:
        return cls(
            sessions=await open_table(bus, "tinker_sessions", SessionRow, replicas=replicas),
            models=await open_table(bus, MODELS, ModelRow, replicas=replicas),
            groups=await open_table(bus, "tinker_groups", GroupRow, replicas=replicas),
            backlogs=await open_table(bus, "tinker_backlogs", BacklogRow, replicas=replicas),
            checkpoints=await open_table(bus, "tinker_checkpoints", CheckpointRow, replicas=replicas),
            samplers=await open_table(bus, "tinker_samplers", SamplerRow, replicas=replicas),
            heartbeats=await open_table(bus, "tinker_heartbeats", HeartbeatRow, replicas=replicas),
            samples=await open_table(
                bus, "tinker_samples", SampleRow, replicas=replicas, durable=False, ttl_s=86_400
            ),
        )
