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

import nats.errors
from nats.aio.msg import Msg

from bus import blobs, codec, scan, subjects
from bus.blobs import TB_BLOB, BlobRef
from bus.connection import BrokerError, BrokerUnreachable, Bus
from bus.errors import newer_format
from bus.events import FORMAT, Op, request_id
from bus.publish import StreamFull, SubjectTaken, store

CONTENT_TYPE, TB_FORMAT, TB_TENANT, TB_VERB, TB_HASH = (
    "Content-Type",
    "Tb-Format",
    "Tb-Tenant",
    "Tb-Verb",
    "Tb-Hash",
)

_POLL_S = 1.0


class LogFull(BrokerError):
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

    def __init__(self, bus: Bus, group: str) -> None:
        self._bus = bus
        self.group = group
        self._filter = f"{subjects.PREFIX}.ops.{subjects.escape(group)}.*.*"
        self.skipped = 0
        """Messages on the log's subjects that no server of ours wrote."""

    async def append(self, entry: LogEntry, *, timeout_s: float = 10.0) -> Appended:
        """Store one operation; returns once the broker has it on disk.

        A lost answer is asked for again until `timeout_s` is up, and then raises BrokerUnreachable: the operation
        may or may not be there, and appending it once more settles that. A body of any size is taken. Raises
        BodyConflict, LogFull.
        """
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

    async def read(self, from_position: int = 1) -> AsyncGenerator[LogEntry, None]:
        """Every entry from `from_position` on, then new ones as they come, for ever. Large bodies stay where they are.

        Outlives broker restarts and lost wake-ups: what is next is asked for by position, at every announcement, at
        every reconnection and once a second. Messages without our headers are skipped and counted. Raises
        NewerFormat for an entry that this version cannot read.
        """
        position = from_position
        wake = asyncio.Event()

        async def announced(_: Msg) -> None:
            wake.set()

        self._bus.on_reconnect.append(wake.set)
        subscription = None
        try:
            while True:
                wake.clear()
                try:
                    if subscription is None:
                        subscription = await self._bus.nc.subscribe(
                            subjects.stored(self._filter), cb=announced
                        )
                    found = await scan.batch(self._bus, subjects.OPS_STREAM, self._filter, position)
                except (BrokerUnreachable, nats.errors.Error) as error:
                    if self._bus.nc.is_closed:
                        raise self._bus.unreachable("reading the log", error) from None
                    await _wait(wake, 0.25)
                    continue
                for message in found:
                    position = message.position + 1
                    entry = _entry(message)
                    if entry is None:
                        self.skipped += 1
                    else:
                        if entry.format > FORMAT:
                            raise newer_format(entry.format, FORMAT)
                        yield entry
                if not found:
                    await _wait(wake, _POLL_S)
        finally:
            self._bus.on_reconnect.remove(wake.set)
            if subscription is not None:
                with contextlib.suppress(nats.errors.Error):
                    await subscription.unsubscribe()


async def _wait(wake: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await wake.wait()


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
