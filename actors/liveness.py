"""Heartbeats of ranks: a killed process is noticed by Ray, a stopped one by nobody else.

Each rank sends a datagram a second from a thread of its own, also while an operation runs. The group counts a rank
as lost when none has come for a while. A stopped peer hangs the others in a collective for ever, so the whole group
is killed then.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

BEAT_S = 1.0


@dataclass(frozen=True, slots=True)
class Address:
    """Where heartbeats go. The token keeps out datagrams of others."""

    host: str
    port: int
    token: str


class Beat(msgspec.Struct, frozen=True):
    token: str
    rank: int
    pid: int


def beat(address: Address, rank: int) -> None:
    """Send heartbeats from now on, from a daemon thread."""
    body = msgspec.msgpack.encode(Beat(address.token, rank, os.getpid()))

    def send() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
            while True:
                with contextlib.suppress(OSError):  # nobody listens just now
                    out.sendto(body, (address.host, address.port))
                time.sleep(BEAT_S)

    threading.Thread(target=send, name="heartbeat", daemon=True).start()


class Liveness(asyncio.DatagramProtocol):
    """Where the group hears its ranks. `await Liveness.open(host, ranks)`; then `watch` once the ranks are up."""

    def __init__(self, token: str, ranks: int) -> None:
        self._token = token
        self._heard = dict.fromkeys(range(ranks), 0.0)
        self._pids: dict[int, int] = {}
        self._transport: asyncio.DatagramTransport
        self.address: Address

    @classmethod
    async def open(cls, host: str, ranks: int) -> Liveness:
        token = secrets.token_hex(8)
        loop = asyncio.get_running_loop()
        transport, self = await loop.create_datagram_endpoint(lambda: cls(token, ranks), local_addr=(host, 0))
        self._transport = transport
        self.address = Address(host, transport.get_extra_info("sockname")[1], token)
        return self

    def datagram_received(self, data: bytes, _: object) -> None:
        try:
            heard = msgspec.msgpack.decode(data, type=Beat)
        except msgspec.MsgspecError:
            return
        if heard.token == self._token and heard.rank in self._heard:
            self._heard[heard.rank] = time.monotonic()
            self._pids[heard.rank] = heard.pid

    async def watch(self, timeout_s: float, lost: Callable[[str], None]) -> None:
        """Returns after it has called `lost` with what happened: a rank was silent for `timeout_s`."""
        pause_s = min(BEAT_S, timeout_s / 4)
        self._hear_all()
        checked = time.monotonic()
        while True:
            await asyncio.sleep(pause_s)
            now = time.monotonic()
            if now - checked > 2 * pause_s + BEAT_S:
                self._hear_all()  # it was us who slept
            checked = now
            silent = [rank for rank, at in self._heard.items() if now - at > timeout_s]
            if silent:
                lost(f"rank {silent[0]} gave no sign of life for {timeout_s:g} s")
                return

    def kill(self) -> None:
        """SIGKILL to every rank that was heard of: one that is stopped does not answer to anything else."""
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self._transport.close()

    def _hear_all(self) -> None:
        self._heard = dict.fromkeys(self._heard, time.monotonic())
