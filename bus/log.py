"""The OPS log: every operation, once, in the order in which it was accepted.

An operation's identity is its subject, `(group, model_id, seq_id)`. Appends demand that the subject is still empty,
so of two writers one wins and the other learns what is there. A body that is too large for one message is stored
apart, and its entry carries a reference. The log is read from a position, as from Kafka:
nothing is redelivered because work was slow, and nothing on the broker remembers the reader.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass, replace

from bus import blobs, codec, scan, subjects
from bus.blobs import TB_BLOB, BlobRef
from bus.connection import Bus
from bus.errors import newer_format
from bus.events import FORMAT, Op, request_id
from bus.ledger import Ledger
from bus.publish import StreamFull, SubjectTaken, store
from bus.tail import tail

CONTENT_TYPE, TB_FORMAT, TB_TENANT, TB_VERB, TB_HASH = (
    "Content-Type",
    "Tb-Format",
    "Tb-Tenant",
    "Tb-Verb",
    "Tb-Hash",
)


class LogFull(StreamFull):
    """The log takes no more for now; nothing was stored."""


class BodyConflict(Exception):
    """Another body already stands on the log under this identity."""

    def __init__(self, existing: LogEntry) -> None:
        super().__init__(
            f"operation {existing.request_id} is already on the log with another body "
            f"({existing.verb}, hash {existing.body_hash}): a number is used once"
        )
        self.existing = existing


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One operation as it stands on the log, its body still encoded."""

    tenant: str
    model_id: str
    seq_id: int | None
    """None for `unload_model` alone."""
    verb: str
    content_type: str
    body: bytes
    body_hash: str
    position: int | None = None
    """The entry's sequence number in the stream; None before it is appended."""
    format: int = FORMAT
    blob: BlobRef | None = None
    """Where the body is, when it is not here: `OpsLog.whole` brings it."""

    @property
    def size(self) -> int:
        """Bytes of the body, wherever it is."""
        return len(self.body) if self.blob is None else self.blob.size

    @property
    def request_id(self) -> str:
        return request_id(self.model_id, self.seq_id)

    def op(self) -> Op:
        """The decoded operation of an entry that holds its body. Raises CodecError, NewerFormat."""
        return codec.decode_op(self.body, self.content_type, self.format)


@dataclass(frozen=True, slots=True)
class Appended:
    position: int
    duplicate: bool
    """The same body was there already."""


def body_hash(body: bytes, content_type: str) -> str:
    """blake2b-128 of the bytes as they were sent, in hex; equal bytes of two content types are equal."""
    del content_type
    return hashlib.blake2b(body, digest_size=16).hexdigest()


def entry(
    tenant: str, model_id: str, seq_id: int | None, verb: str, body: bytes, content_type: str = codec.MSGPACK
) -> LogEntry:
    """An entry to append."""
    return LogEntry(
        tenant=tenant,
        model_id=model_id,
        seq_id=seq_id,
        verb=verb,
        content_type=content_type,
        body=body,
        body_hash=body_hash(body, content_type),
    )


class OpsLog:
    """The log of one group."""

    def __init__(self, bus: Bus, group: str, ledger: Ledger | None = None) -> None:
        """Whoever appends to a log that is trimmed needs its `ledger`."""
        self._bus = bus
        self._ledger = ledger
        self.read_to = 0
        """Position of the newest message that `read` is done with."""
        self.group = group
        self._prefix = f"{subjects.PREFIX}.ops.{subjects.escape(group)}"
        self._filter = f"{self._prefix}.*.*"
        self.skipped = 0
        """Messages on the log's subjects that no server of ours wrote."""

    async def append(self, entry: LogEntry, *, trimmed_below: int = 0, timeout_s: float = 10.0) -> Appended:
        """Store one operation; returns once the broker has it on disk. Numbers below `trimmed_below` may be gone
        from the log, and are looked up in the ledger.

        A lost answer is asked for again until `timeout_s` is up, and then raises BrokerUnreachable: the operation
        may or may not be there, and appending it once more settles that. A body of any size is taken. Raises
        BodyConflict, LogFull.
        """
        if entry.seq_id is not None and entry.seq_id < trimmed_below:
            assert self._ledger is not None, "a log that is trimmed is appended to with its ledger"
            row = await self._ledger.find(entry.model_id, entry.seq_id)
            if row is not None:
                return self._compared(entry, replace(entry, body_hash=row.body_hash, position=row.position))
        ref = blobs.reference(self._bus, entry.body)
        if ref is None:
            return await self._append(entry, timeout_s)
        existing = await self.get(entry.model_id, entry.seq_id)
        if existing is not None:
            return self._compared(entry, existing)
        prefix = subjects.blob(self.group, entry.model_id, entry.seq_id)
        try:
            await blobs.put(self._bus, prefix, ref, entry.body, doing=f"the body of {entry.request_id}")
        except StreamFull as error:
            raise LogFull(str(error)) from None
        try:
            return await self._append(replace(entry, body=b"", blob=ref), timeout_s)
        except BodyConflict as error:
            if error.existing.blob != ref:
                await blobs.drop(self._bus, subjects.BLOB_STREAM, prefix, ref)
            raise

    async def _append(self, entry: LogEntry, timeout_s: float) -> Appended:
        doing = f"operation {entry.request_id}"
        headers = {
            CONTENT_TYPE: entry.content_type,
            TB_FORMAT: str(entry.format),
            TB_TENANT: subjects.escape(entry.tenant),
            TB_VERB: entry.verb,
            TB_HASH: entry.body_hash,
        }
        if entry.blob is not None:
            headers[TB_BLOB] = str(entry.blob)
        subject = subjects.ops(self.group, entry.model_id, entry.seq_id)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                position = await store(
                    self._bus,
                    subject,
                    entry.body,
                    headers,
                    doing=doing,
                    expected_revision=0,
                    timeout_s=max(0.0, deadline - time.monotonic()),
                )
                return Appended(position, duplicate=False)
            except StreamFull as error:
                raise LogFull(str(error)) from None
            except SubjectTaken:
                existing = await self.get(entry.model_id, entry.seq_id)
                if existing is not None:
                    return self._compared(entry, existing)
            # Taken, and not to be read where we asked: a replica that is behind. Ask again.
            if time.monotonic() >= deadline:
                raise self._bus.unreachable(doing)
            await asyncio.sleep(0.05)

    @staticmethod
    def _compared(entry: LogEntry, existing: LogEntry) -> Appended:
        if existing.body_hash != entry.body_hash:
            raise BodyConflict(existing)
        assert existing.position is not None
        return Appended(existing.position, duplicate=True)

    async def get(self, model_id: str, seq_id: int | None) -> LogEntry | None:
        """The entry of one identity, as `read` gives it. Raises BrokerUnreachable."""
        found = await scan.last_of(self._bus, subjects.OPS_STREAM, subjects.ops(self.group, model_id, seq_id))
        return None if found is None else _entry(found)

    async def trim(self, model_id: str, below_position: int, below_seq: int) -> None:
        """Drop the model's entries before a position, and the bodies that numbers below `below_seq` have apart.

        Raises BrokerUnreachable.
        """
        every = self._filter_of(model_id)
        await scan.purge(self._bus, subjects.OPS_STREAM, every, below_position=below_position)
        stored = await scan.subjects_of(self._bus, subjects.BLOB_STREAM, subjects.blobs(self.group, model_id))
        for token in {subjects.split(subject)[3] for subject in stored}:
            seq_id = subjects.parse_seq_token(token)
            if seq_id is not None and seq_id < below_seq:
                bodies = f"{subjects.blob(self.group, model_id, seq_id)}.>"
                await scan.purge(self._bus, subjects.BLOB_STREAM, bodies)

    async def whole(self, entry: LogEntry) -> LogEntry:
        """The entry with its body, wherever that is. Raises BlobLost, BrokerUnreachable."""
        if entry.blob is None:
            return entry
        prefix = subjects.blob(self.group, entry.model_id, entry.seq_id)
        what = f"the body of {entry.request_id}"
        body = await blobs.get(self._bus, subjects.BLOB_STREAM, prefix, entry.blob, what=what)
        return replace(entry, body=body, blob=None)

    async def forget(self, model_id: str) -> None:
        """Remove what is stored apart of a model that has ended and will not be replayed. Idempotent."""
        await scan.purge(self._bus, subjects.BLOB_STREAM, subjects.blobs(self.group, model_id))

    async def drop(self, model_id: str) -> None:
        """Remove all that stands here of a model that has ended and whose results have expired. Idempotent."""
        await self.forget(model_id)
        await scan.purge(self._bus, subjects.OPS_STREAM, self._filter_of(model_id))

    async def forget_all(self, ended: Collection[str]) -> None:
        """`forget` every one of these models that still has anything."""
        stored = await scan.subjects_of(self._bus, subjects.BLOB_STREAM, subjects.blobs(self.group))
        for model_id in {subjects.split(subject)[2] for subject in stored} & set(ended):
            await self.forget(model_id)

    async def holds(self, model_id: str, seq_id: int | None) -> bool:
        """Whether there is an entry of that identity; its body stays where it is. Raises BrokerUnreachable."""
        return await scan.holds(self._bus, subjects.OPS_STREAM, subjects.ops(self.group, model_id, seq_id))

    async def last_position(self) -> int:
        """The stream's last sequence number, over all groups; 0 while it is empty. Raises BrokerUnreachable."""
        return await scan.last_position(self._bus, subjects.OPS_STREAM)

    async def read(
        self, from_position: int = 1, *, model_id: str | None = None
    ) -> AsyncGenerator[LogEntry, None]:
        """Every entry from `from_position` on, or those of one model, then new ones as they come, for ever. Large
        bodies stay where they are.

        Outlives broker restarts and lost wake-ups. Messages without our headers are skipped and counted. Raises
        NewerFormat for an entry that this version cannot read.
        """
        self.read_to = from_position - 1
        messages = tail(self._bus, subjects.OPS_STREAM, self._filter_of(model_id), from_position)
        async with contextlib.aclosing(messages):
            async for message in messages:
                entry = _entry(message)
                if entry is None:
                    self.skipped += 1
                elif entry.format > FORMAT:
                    raise newer_format(entry.format, FORMAT)
                else:
                    yield entry
                self.read_to = message.position

    async def has_more(self) -> bool:
        """Whether anything stands on the log behind `read_to`. Raises BrokerUnreachable."""
        return bool(await scan.batch(self._bus, subjects.OPS_STREAM, self._filter, self.read_to + 1))

    async def so_far(self, *, model_id: str | None = None) -> AsyncGenerator[LogEntry, None]:
        """Every entry that is on the log now, or those of one model, of any format. Raises BrokerUnreachable."""
        last = await self.last_position()
        position = 1
        while position <= last:
            found = await scan.batch(self._bus, subjects.OPS_STREAM, self._filter_of(model_id), position)
            if not found:
                return
            for message in found:
                if message.position > last:
                    return
                position = message.position + 1
                entry = _entry(message)
                if entry is not None:
                    yield entry

    async def models(self) -> set[str]:
        """Every model that has an operation on the log. Raises BrokerUnreachable."""
        models = set()
        for subject in await scan.subjects_of(self._bus, subjects.OPS_STREAM, self._filter):
            with contextlib.suppress(ValueError):
                models.add(subjects.split(subject)[2])
        return models

    async def numbers(self, model_id: str) -> set[int | None]:
        """Every `seq_id` that one model has on the log; None for its end. Raises BrokerUnreachable."""
        found = await scan.subjects_of(self._bus, subjects.OPS_STREAM, self._filter_of(model_id))
        return subjects.numbers(found)

    def _filter_of(self, model_id: str | None) -> str:
        return self._filter if model_id is None else f"{self._prefix}.{subjects.escape(model_id)}.*"


def _entry(message: scan.StoredMessage) -> LogEntry | None:
    """None for a message that no server of ours wrote."""
    try:
        _, _, model_id, number = subjects.split(message.subject)
        return LogEntry(
            tenant=subjects.unescape(message.headers[TB_TENANT]),
            model_id=model_id,
            seq_id=subjects.parse_seq_token(number),
            verb=message.headers[TB_VERB],
            content_type=message.headers[CONTENT_TYPE],
            body=message.data,
            body_hash=message.headers[TB_HASH],
            position=message.position,
            format=int(message.headers[TB_FORMAT]),
            blob=BlobRef.parse(message.headers[TB_BLOB]) if TB_BLOB in message.headers else None,
        )
    except (KeyError, ValueError):
        return None
