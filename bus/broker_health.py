"""Whether the embedded broker can still store, and when to restart it because it cannot.

A stream that met a full disk takes nothing more, and says so to nobody who publishes; others go on, and what is stored
can be read. It stays like that when there is room again, until the broker starts anew.
"""

from __future__ import annotations

import json
import math
import socket

from bus.broker_config import SUPERVISOR_USER

_INBOX = "health"
_QUESTION = "$SYS.REQ.SERVER.PING.HEALTHZ"
SHORTEST_S, LONGEST_S = 2.0, 60.0
"""Between two restarts, while they do not help."""
WELL_S = 60.0
"""So long after a restart without a complaint, it has helped."""


def ask(port: int, password: str, *, timeout_s: float = 5.0) -> str | None:
    """What the broker on a port of this machine complains of; None when it is well.

    Raises OSError where nothing answers in time, and what answers is none of ours.
    """
    with socket.create_connection(("127.0.0.1", port), timeout_s) as connection:
        connection.settimeout(timeout_s)
        greeting = {"user": SUPERVISOR_USER, "pass": password, "verbose": False, "pedantic": False}
        connection.sendall(
            f"CONNECT {json.dumps(greeting)}\r\nSUB {_INBOX} 1\r\nPUB {_QUESTION} {_INBOX} 0\r\n\r\n".encode()
        )
        lines = connection.makefile("rb")
        while line := lines.readline():
            word, *rest = line.split()
            if word == b"MSG":
                return _complaint(lines.read(int(rest[-1])))
            if word == b"-ERR":
                raise OSError(f"the broker refuses its supervisor: {line.decode(errors='replace').strip()}")
    raise OSError("the broker hung up on its supervisor")


def _complaint(body: bytes) -> str | None:
    try:
        health = json.loads(body)["data"]
        return None if health["status"] == "ok" else str(health.get("error") or health["status"])
    except (ValueError, KeyError, TypeError):
        raise OSError(f"the broker says what its supervisor cannot read: {body[:200]!r}") from None


class Mending:
    """Decides about restarts. Pure; times are seconds of any one clock that does not go back."""

    def __init__(self, room_bytes: int) -> None:
        """With less than `room_bytes` on its disk a broker is left as it is: it may not even start there."""
        self.room_bytes = room_bytes
        self._complaints = 0
        self._pause_s = SHORTEST_S
        self._restarted = -math.inf

    def due(self, complaint: str | None, room: int, now: float) -> bool:
        """Whether to restart a broker that has just answered so, with `room` bytes left on its disk."""
        if complaint is None:
            self._complaints = 0
            if now - self._restarted >= WELL_S:
                self._pause_s = SHORTEST_S
            return False
        self._complaints += 1
        if self._complaints < 2 or room < self.room_bytes or now - self._restarted < self._pause_s:
            return False  # one complaint alone may be of a broker that is just starting
        self._restarted, self._complaints = now, 0
        self._pause_s = min(LONGEST_S, 2 * self._pause_s)
        return True
