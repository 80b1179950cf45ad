"""Results: one per operation, written once, readable until they expire.

A result is what the broker has stored: whoever waits is woken by its announcement and then reads it, so that an
answer is never given that a crash could take back.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from bus import blobs, codec, scan, subjects
from bus.blobs import TB_BLOB, BlobLost, BlobRef
from bus.connection import BrokerUnreachable, Bus
from bus.events import FORMAT, Result
from bus.log import CONTENT_TYPE, TB_FORMAT
from bus.publish import StreamFull, SubjectTaken, store
from bus.tail import tail

_POLL_S = 10.0
_SOON_S = (0.002, 0.005, 0.02, 0.05, 0.2, 0.5)
"""When to look again after a live message: a tenant sees it before the broker has stored it."""


class ResultsFull(StreamFull):
    """The results stream takes no more; nothing was stored."""


class Published(enum.Enum):
    NEW = "new"
    SAME = "same"
    """It was there already, byte for byte."""
    DIFFERENT = "different"
    """Another result was there already, and stays."""


@dataclass(frozen=True, slots=True)
class StoredResult:
    body: bytes
    content_type: str

    def result(self) -> Result:
        """The decoded result. Raises CodecError, NewerFormat."""
        return codec.decode_result(self.body, self.content_type)


class Results:
    """Publish and await results over one connection, with one subscription for all waits together.

    Servers see every tenant. A tenant's own connection passes `tenant` and sees its own.
    """

    def __init__(self, bus: Bus, tenant: str | None = None) -> None:
        self._bus = bus
        if tenant is None:
            self._wake_ups = subjects.stored(f"{subjects.PREFIX}.results.>")
            self._prefix = subjects.stored(subjects.PREFIX)
        else:
            self._wake_ups = f"{subjects.PREFIX}.results.{subjects.escape(tenant)}.>"
            self._prefix = subjects.PREFIX
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self._subscription: asyncio.Task[Subscription] | None = None
        self._closed = False

    async def publish(
        self, tenant: str, result: Result, content_type: str = codec.MSGPACK, *, timeout_s: float = 10.0
    ) -> Published:
        """Store the one answer to an operation, of any size. Repeating it, as a replay does, changes nothing.

        Raises BrokerUnreachable once `timeout_s` is up, ResultsFull, CodecError.
        """
        body = codec.encode(result, content_type)
        ref = blobs.reference(self._bus, body)
        doing = f"the result of {result.request_id}"
        subject = subjects.results(tenant, result.model_id, result.seq_id)
        headers = {CONTENT_TYPE: content_type, TB_FORMAT: str(FORMAT)}
        if ref is not None:
            headers[TB_BLOB] = str(ref)
        deadline = time.monotonic() + timeout_s
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                # Looking first keeps a replayed result away from live subscribers.
                existing = await scan.last_of(self._bus, subjects.RESULTS_STREAM, subject)
                if existing is not None:
                    return Published.SAME if _is(existing, body, ref) else Published.DIFFERENT
                if ref is not None:
                    await blobs.put(self._bus, subject, ref, body, doing=doing)
                sent = body if ref is None else b""
                await store(
                    self._bus, subject, sent, headers, doing=doing, expected_revision=0, timeout_s=left
                )
            except StreamFull as error:
                raise ResultsFull(str(error)) from None
            except SubjectTaken:
                pass  # by another server meanwhile, or by a try of ours whose answer was lost: look again
            except BrokerUnreachable:
                if time.monotonic() >= deadline:
                    raise
            else:
                return Published.NEW
            if time.monotonic() >= deadline:
                raise self._bus.unreachable(doing)
            await asyncio.sleep(0.05)

    async def get(self, tenant: str, model_id: str, seq_id: int | None) -> StoredResult | None:
        """The stored result, or None while there is none (or no longer). Raises BrokerUnreachable."""
        return await self._get(subjects.results(tenant, model_id, seq_id))

    async def numbers(self, tenant: str, model_id: str) -> set[int | None]:
        """Every `seq_id` of a model that has a readable result; None for its end. For servers."""
        pattern = subjects.results_of(tenant, model_id)
        return subjects.numbers(await scan.subjects_of(self._bus, subjects.RESULTS_STREAM, pattern))

    async def last_position(self) -> int:
        """The stream's last sequence number, over all models; 0 while it is empty. Raises BrokerUnreachable."""
        return await scan.last_position(self._bus, subjects.RESULTS_STREAM)

    async def read(
        self, tenant: str, model_id: str, from_position: int = 1
    ) -> AsyncGenerator[tuple[int | None, StoredResult], None]:
        """A model's readable results with their `seq_id`, in the order in which they were stored, then new ones as
        they come, for ever. For servers.
        """
        pattern = subjects.results_of(tenant, model_id)
        messages = tail(self._bus, subjects.RESULTS_STREAM, pattern, from_position)
        async with contextlib.aclosing(messages):
            async for message in messages:
                if (stored := await self._stored(message)) is not None:
                    for number in subjects.numbers([message.subject]):
                        yield number, stored

    async def wait(
        self, tenant: str, model_id: str, seq_id: int | None, timeout_s: float | None
    ) -> StoredResult | None:
        """The stored result as soon as there is one, or None when `timeout_s` is over. May be cancelled anywhere.

        Listens first and looks afterwards, so nothing falls between. A broker that is away meanwhile is waited for.
        """
        subject = subjects.results(tenant, model_id, seq_id)
        woken = asyncio.Event()
        self._waiting.setdefault(subject, set()).add(woken)
        try:
            async with asyncio.timeout(timeout_s):
                await self._listening()
                while True:
                    woken.clear()
                    found = await self._look(subject)
                    if found is not None:
                        return found
                    if await _happened(woken, _POLL_S):
                        for pause_s in (0.0, *_SOON_S):
                            await asyncio.sleep(pause_s)
                            if (found := await self._look(subject)) is not None:
                                return found
        except TimeoutError:
            return None
        finally:
            events = self._waiting[subject]
            events.discard(woken)
            if not events:
                del self._waiting[subject]

    async def close(self) -> None:
        """Stop listening; whoever still waits gets BrokerUnreachable."""
        self._closed = True
        self._wake_all()
        if self._subscription is not None:
            self._bus.on_reconnect.remove(self._wake_all)
            with contextlib.suppress(nats.errors.Error, asyncio.CancelledError):
                await (await self._subscription).unsubscribe()
            self._subscription = None

    async def _look(self, subject: str) -> StoredResult | None:
        if self._closed:
            raise BrokerUnreachable(f"closed while waiting for {subject}")
        try:
            return await self._get(subject)
        except BrokerUnreachable:
            if self._bus.nc.is_closed or self._closed:
                raise
            await asyncio.sleep(0.1)
            return None

    async def _get(self, subject: str) -> StoredResult | None:
        found = await scan.last_of(self._bus, subjects.RESULTS_STREAM, subject)
        if found is None:
            return None
        return await self._stored(found)

    async def _stored(self, message: scan.StoredMessage) -> StoredResult | None:
        body, content_type = message.data, message.headers.get(CONTENT_TYPE, codec.MSGPACK)
        if TB_BLOB in message.headers:
            ref = BlobRef.parse(message.headers[TB_BLOB])
            subject = message.subject
            try:
                body = await blobs.get(self._bus, subjects.RESULTS_STREAM, subject, ref, what=subject)
            except BlobLost:
                return None  # expired, and the rest of it will be in a moment
        return StoredResult(body, content_type)

    async def _listening(self) -> None:
        """Returns once the one subscription is sent. One connection: the broker has it before any later look."""
        if self._subscription is None:
            listen = self._bus.nc.subscribe(self._wake_ups, cb=self._announced)
            self._subscription = asyncio.create_task(listen)
            self._bus.on_reconnect.append(self._wake_all)
        try:
            await asyncio.shield(self._subscription)
        except nats.errors.Error as error:
            raise self._bus.unreachable("listening for results", error) from None

    async def _announced(self, msg: Msg) -> None:
        subject = subjects.PREFIX + msg.subject.removeprefix(self._prefix)
        for woken in self._waiting.get(subject, ()):
            woken.set()

    def _wake_all(self) -> None:
        for events in self._waiting.values():
            for woken in events:
                woken.set()


def _is(existing: scan.StoredMessage, body: bytes, ref: BlobRef | None) -> bool:
    """Whether that is what is stored, wherever it is."""
    if ref is None:
        return existing.data == body
    stored = existing.headers.get(TB_BLOB)
    return stored is not None and BlobRef.parse(stored).hash == ref.hash


async def _happened(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
