"""Connecting to a broker, and what we ask of one: reachable, new enough, JetStream on.

After the first connection a `Bus` reconnects for ever, quietly; what was asked of it meanwhile fails with
`BrokerUnreachable` once its own time is up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext

from bus.errors import (
    BrokerError,
    BrokerTooOld,
    BrokerUnreachable,
    MessageTooLarge,
    NoJetStream,
    NotAllowed,
    WrongCredentials,
)
from bus.hardening import harden
from bus.subjects import LONGEST_SUBJECT

__all__ = [
    "HEADER_ROOM",
    "BrokerError",
    "BrokerTooOld",
    "BrokerUnreachable",
    "Bus",
    "Credentials",
    "MessageTooLarge",
    "NoJetStream",
    "NotAllowed",
    "WrongCredentials",
    "connect",
]

OLDEST_VERSION = (2, 11)
"""Batched direct gets came with 2.11."""

HEADER_ROOM = 1024
"""What we leave of `max_payload` for headers: the broker counts them, and hangs up on a message above the limit."""

_URL = re.compile(r"(nats|tls|ws|wss)://([^@/]*@)?(\[[0-9a-fA-F:.]+\]|[^:/@\[\]]+)(:\d{1,5})?/?")


@dataclass(frozen=True, slots=True)
class Credentials:
    user: str
    password: str

    def __repr__(self) -> str:
        return f"Credentials(user={self.user!r}, password=***)"


@dataclass(eq=False, slots=True)
class _Request:
    subject: str
    clock: asyncio.Timeout
    refusal: str | None = None

    def end(self) -> None:
        """Wait no longer."""
        if not self.clock.expired():
            self.clock.reschedule(asyncio.get_running_loop().time())


class Bus:
    """One connection to the broker. Made by `connect`."""

    def __init__(self, nc: Client, url: str, name: str) -> None:
        self.nc = nc
        self.url = url
        self.name = name
        self.js: JetStreamContext = nc.jetstream(timeout=5)
        self.on_reconnect: list[Callable[[], None]] = []
        """Called after each reconnection, when subscriptions are back but messages may have been missed; and at the
        close."""
        self.errors: deque[str] = deque(maxlen=16)
        """The last lines the broker or the network complained with."""
        self._in_flight: set[_Request] = set()
        self._up = asyncio.Event()
        self._up.set()
        self._closing = False

    @property
    def max_payload(self) -> int:
        """The largest message this broker takes, in bytes, headers included."""
        return int(self.nc.max_payload)

    @property
    def connected(self) -> bool:
        return bool(self.nc.is_connected)

    async def request(
        self, subject: str, body: bytes, *, timeout_s: float, headers: dict[str, str] | None = None
    ) -> Msg:
        """One question and its answer.

        While the connection is broken the question waits, within its time, for the connection to come back. Raises
        MessageTooLarge for a subject that the broker would hang up on, NotAllowed as soon as the broker says so, and
        BrokerUnreachable when the time is up, when nobody listens, or when the connection broke after the question
        was sent, for then the answer may be lost.
        """
        if len(subject) > LONGEST_SUBJECT:
            raise MessageTooLarge(
                f"subject {subject[:60]}… has {len(subject)} characters; the limit is {LONGEST_SUBJECT}"
            )
        request: _Request | None = None
        task = asyncio.current_task()
        cancelling = task.cancelling() if task is not None else 0
        try:
            async with asyncio.timeout(timeout_s) as clock:
                await self._connected()
                request = _Request(subject, clock)
                self._in_flight.add(request)
                try:
                    answer = await self.nc.request(subject, body, timeout=timeout_s + 60, headers=headers)
                finally:
                    self._in_flight.discard(request)
        except TimeoutError as error:
            if request is not None and request.refusal is not None:
                raise NotAllowed(request.refusal) from None
            raise self.unreachable(f"no answer on {subject}", error) from None
        except (nats.errors.Error, OSError) as error:
            raise self.unreachable(f"no answer on {subject}", error) from error
        if task is not None and task.cancelling() > cancelling:
            raise asyncio.CancelledError  # the client's asyncio.wait_for of Python 3.11 can swallow it
        return answer

    async def next_message(self, sub: Subscription, *, timeout_s: float) -> Msg:
        """The subscription's next message.

        Raises BrokerUnreachable after `timeout_s` of silence, or when the connection broke: what was on its way then
        is lost.
        """
        try:
            async with asyncio.timeout(timeout_s) as clock:
                request = _Request(sub.subject, clock)
                self._in_flight.add(request)
                try:
                    return await sub.next_msg(timeout=None)
                finally:
                    self._in_flight.discard(request)
        except (TimeoutError, nats.errors.Error) as error:
            raise self.unreachable(f"silent on {sub.subject}", error) from None

    def check_size(self, body: bytes, what: str) -> None:
        """Raises MessageTooLarge for what the broker would hang up on."""
        if len(body) > self.max_payload - HEADER_ROOM:
            raise MessageTooLarge(
                f"{what} has {len(body)} bytes; the broker takes {self.max_payload - HEADER_ROOM} "
                f"(max_payload {self.max_payload} less {HEADER_ROOM} for headers)"
            )

    def unreachable(self, doing: str, error: BaseException | None = None) -> BrokerUnreachable:
        because = f" ({_reason(error)})" if error is not None and _reason(error) else ""
        return BrokerUnreachable(
            f"the broker at {_without_password(self.url)} did not answer: {doing}{because}"
        )

    def refusal(self, doing: str, error: nats.js.errors.APIError) -> BrokerError:
        """JetStream said no: BrokerUnreachable for what it cannot do now, as without room on its disk."""
        if isinstance(error, nats.js.errors.ServiceUnavailableError) or (error.code or 0) >= 500:
            return self.unreachable(f"{doing}: {error.description}")
        return BrokerError(f"the broker refuses {doing}: {error.description}")

    async def close(self) -> None:
        """Close at once. Never drains: a drain can hang after a timed-out fetch."""
        if not self._closing:
            self._closing = True
            with contextlib.suppress(nats.errors.Error, OSError, TimeoutError):
                await self.nc.close()

    async def __aenter__(self) -> Bus:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _on_error(self, error: Exception) -> None:
        line = _reason(error)
        self.errors.append(line)
        if "permissions violation" in line.lower():
            for request in list(self._in_flight):
                if f'"{request.subject}"'.lower() in line.lower():
                    request.refusal = f"the broker does not allow this user to use {request.subject}"
                    request.end()

    def _end_waits(self) -> None:
        self._up.set()
        for request in list(self._in_flight):
            request.end()
        for callback in list(self.on_reconnect):
            callback()

    async def _connected(self) -> None:
        # What is published on a broken connection would be sent later, after we gave up on it.
        if not self.nc.is_connected and not self.nc.is_closed:
            self._up.clear()
        await self._up.wait()

    async def _on_disconnect(self) -> None:
        self._up.clear()

    async def _on_close(self) -> None:
        self._end_waits()

    async def _on_reconnect(self) -> None:
        self._end_waits()


async def connect(
    url: str,
    credentials: Credentials | None = None,
    *,
    name: str,
    timeout_s: float = 5.0,
    uses_jetstream: bool = True,
) -> Bus:
    """Connect, and check the broker's version and JetStream.

    `uses_jetstream=False` is for tenants, whose account has no JetStream of its own. Raises BrokerUnreachable,
    BrokerTooOld, NoJetStream or WrongCredentials, each with one clear line.
    """
    shown = _without_password(url)
    servers = [part.strip() for part in url.split(",")]
    for server in servers:
        if not _URL.fullmatch(server):
            raise BrokerUnreachable(
                f"{_without_password(server)!r} is no broker address: write nats://HOST:PORT"
            )
    nc = Client()
    harden(nc)
    bus = Bus(nc, url, name)
    options: dict[str, Any] = {}
    if credentials is not None:
        options = {"user": credentials.user, "password": credentials.password}
    try:
        await nc.connect(
            servers=servers,
            name=name,
            error_cb=bus._on_error,
            disconnected_cb=bus._on_disconnect,
            reconnected_cb=bus._on_reconnect,
            closed_cb=bus._on_close,
            allow_reconnect=False,
            max_reconnect_attempts=1,
            connect_timeout=timeout_s,
            reconnect_time_wait=0.25,
            ping_interval=10,
            max_outstanding_pings=2,
            pending_size=16 * 2**20,
            **options,
        )
    except (nats.errors.Error, OSError, TimeoutError) as error:
        await bus.close()
        if isinstance(error, nats.errors.AuthorizationError) or "uthorization" in str(error):
            who = f"user {credentials.user!r}" if credentials else "a connection without credentials"
            raise WrongCredentials(f"the broker at {shown} refuses {who}: check user and password") from None
        reason = _reason(error)
        if isinstance(error, nats.errors.NoServersError) and bus.errors:
            reason = bus.errors[-1]
        raise BrokerUnreachable(f"no NATS broker answers at {shown}: {reason}") from None
    nc.options["allow_reconnect"] = True
    nc.options["max_reconnect_attempts"] = -1
    try:
        await _check(bus, shown, uses_jetstream, timeout_s)
    except BaseException:
        await bus.close()
        raise
    return bus


async def _check(bus: Bus, shown: str, uses_jetstream: bool, timeout_s: float) -> None:
    info = bus.nc._server_info
    version = str(info.get("version", "unknown"))
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_VERSION:
        oldest = ".".join(map(str, OLDEST_VERSION))
        raise BrokerTooOld(
            f"the broker at {shown} is nats-server {version}; tinkerbus needs {oldest} or newer"
        )
    if not info.get("jetstream", False):
        raise NoJetStream(f"the broker at {shown} runs without JetStream: start nats-server with -js")
    if not uses_jetstream:
        return
    try:
        answer = await bus.request("$JS.API.INFO", b"", timeout_s=timeout_s)
    except NotAllowed:
        raise NotAllowed(f"these credentials may not use JetStream at {shown}") from None
    except BrokerUnreachable as error:
        if isinstance(error.__cause__, nats.errors.NoRespondersError):
            raise NoJetStream(f"JetStream is not enabled for this account at {shown}") from None
        raise BrokerUnreachable(f"JetStream at {shown} does not answer") from None
    if refusal := json.loads(answer.data).get("error"):
        raise NoJetStream(f"JetStream at {shown} refuses this account: {refusal.get('description')}")


def _without_password(url: str) -> str:
    return re.sub(r"//[^@/,]*@", "//", url)


def _reason(error: BaseException) -> str:
    text = str(error).removeprefix("nats: ").strip()
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
    return " ".join((text or type(error).__name__).split())
