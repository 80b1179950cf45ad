"""The way of event clients onto the log: they publish on `submit`, the intake takes it from there.

A publish that the broker acknowledged is stored and reaches an intake at least once; it is gone from the queue only
when the intake has acknowledged it. Which of several intakes gets it does not matter: appending to the log is
idempotent, and order is made from `seq_id` later.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable
from dataclasses import dataclass

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js import api

from bus import codec, subjects
from bus.connection import BrokerError, BrokerUnreachable, Bus
from bus.errors import CodecError
from bus.events import FORMAT, Submission
from bus.publish import StreamFull, store
from bus.pull import pulled

CONTENT_TYPE, TB_FORMAT = "Content-Type", "Tb-Format"

_ACK_WAIT_S = 5.0


class QueueFull(BrokerError):
    """The model's queue takes no more for now; nothing was stored."""


class Submitter:
    """The client's side: publish, and know that it is stored."""

    def __init__(self, bus: Bus, tenant: str) -> None:
        self._bus = bus
        self.tenant = tenant

    async def submit(
        self,
        model_id: str,
        submission: Submission,
        content_type: str = codec.MSGPACK,
        *,
        timeout_s: float = 30.0,
    ) -> None:
        """Returns when the broker has it on disk. Submitting the same again is harmless.

        Raises QueueFull, MessageTooLarge, NotAllowed, and BrokerUnreachable when there was no answer for
        `timeout_s`: then it may or may not be stored.
        """
        body = codec.encode(submission, content_type)
        headers = {CONTENT_TYPE: content_type, TB_FORMAT: str(FORMAT)}
        try:
            await store(
                self._bus,
                subjects.submit(self.tenant, model_id),
                body,
                headers,
                doing=f"submitting number {subjects.seq_token(submission.seq_id)} of model {model_id!r}",
                timeout_s=timeout_s,
            )
        except StreamFull as error:
            raise QueueFull(str(error)) from None


@dataclass(frozen=True, slots=True)
class Submitted:
    """One message from the queue. Exactly one of `ack`, `nak`, `term` ends it; else it comes again after 5 s."""

    tenant: str
    """From the subject, which the broker vouches for."""
    model_id: str
    submission: Submission | CodecError
    """What was published, or why it cannot be understood."""
    body: bytes
    content_type: str
    _msg: Msg

    @property
    def deliveries(self) -> int:
        """How often it has come out of the queue, this time included."""
        return int(self._msg.metadata.num_delivered or 1)

    async def ack(self) -> None:
        """It is on the log."""
        await self._end(self._msg.ack())

    async def nak(self, delay_s: float = 1.0) -> None:
        """Not now: bring it again after `delay_s`."""
        await self._end(self._msg.nak(delay_s))

    async def term(self) -> None:
        """Never again."""
        await self._end(self._msg.term())

    @staticmethod
    async def _end(answer: Awaitable[None]) -> None:
        # A lost acknowledgement brings the message again, which the log takes as a duplicate.
        with contextlib.suppress(nats.errors.Error, OSError):
            await answer


class SubmitReader:
    """The intake's side. Any number of readers share the queue."""

    def __init__(self, bus: Bus, name: str = "intake") -> None:
        self._bus = bus
        self._name = name
        self.skipped = 0
        """Messages whose subject names no tenant and model of ours; they are dropped."""

    async def read(self) -> AsyncGenerator[Submitted, None]:
        """Every submission, for ever. Outlives broker restarts and silence; raises BrokerError when refused.

        Close it to stop: what it had fetched and not yet given out goes back to the queue at once.
        """
        while True:
            try:
                await self._ensure_consumer()
                async with contextlib.aclosing(
                    pulled(self._bus, subjects.SUBMIT_STREAM, self._name)
                ) as messages:
                    async for msg in messages:
                        submitted = self._submitted(msg)
                        if submitted is None:
                            self.skipped += 1
                            await msg.term()
                        else:
                            yield submitted
            except (nats.errors.Error, BrokerUnreachable) as error:
                if self._bus.nc.is_closed:
                    raise self._bus.unreachable("reading the submit queue", error) from None
            await asyncio.sleep(0.1)

    async def oldest(self, tenant: str, model_id: str) -> bytes | None:
        """The body of the model's oldest submission that no intake has ended. Raises BrokerUnreachable."""
        subject = subjects.submit(tenant, model_id)
        try:
            found = await self._bus.js.get_msg(subjects.SUBMIT_STREAM, seq=1, subject=subject, next=True)
        except nats.js.errors.NotFoundError:
            return None
        except nats.js.errors.APIError as error:
            raise self._bus.refusal("to read the submit queue", error) from None
        except (nats.errors.Error, TimeoutError) as error:
            raise self._bus.unreachable("reading the submit queue", error) from None
        return found.data or b""

    async def _ensure_consumer(self) -> None:
        try:
            await self._bus.js.add_consumer(
                subjects.SUBMIT_STREAM,
                api.ConsumerConfig(
                    durable_name=self._name,
                    ack_policy=api.AckPolicy.EXPLICIT,
                    ack_wait=_ACK_WAIT_S,
                    max_ack_pending=-1,  # what is held back for one model counts, and must not stop the others
                    max_waiting=512,
                ),
            )
        except nats.js.errors.APIError as error:
            raise self._bus.refusal("the submit queue", error) from None

    @staticmethod
    def _submitted(msg: Msg) -> Submitted | None:
        """None for a subject that names no tenant and model of ours."""
        try:
            _, tenant, model_id = subjects.split(msg.subject)
        except ValueError:
            return None
        content_type = (msg.headers or {}).get(CONTENT_TYPE, codec.MSGPACK)
        submission: Submission | CodecError
        try:
            submission = codec.decode_submission(msg.data, content_type)
            if content_type == codec.PROTOBUF:
                _check_model(codec.peek_forward_backward(msg.data), model_id)
        except CodecError as error:
            submission = error
        return Submitted(tenant, model_id, submission, msg.data, content_type, msg)


def _check_model(identity: tuple[str, int], model_id: str) -> None:
    if identity[0] != model_id:
        raise CodecError(
            f"model_id is {identity[0]!r}, but it was published on the subject of {model_id!r}",
            "model_id",
            seq_id=identity[1],
        )
