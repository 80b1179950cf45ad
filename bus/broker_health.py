"""Whether the embedded broker answers and can still store, and when to restart it because it does not.

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
ANSWER_S = 5.0
"""How long an answer is waited for."""
UNANSWERED = 2
"""So many questions in a row without an answer, and the broker hangs. A busy machine's pauses are shorter."""


def ask(port: int, password: str, *, timeout_s: float = ANSWER_S) -> str | None:
    """What the broker on a port of this machine complains of; None when it is well.

    Raises TimeoutError where something listens and does not answer in time, and OSError where nothing is there or what
    answers is none of ours.
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


class Silence:
    """Decides when a broker that lives and does not answer is to be killed. Pure.

    It counts questions, not seconds: a supervisor that was stopped itself has asked none meanwhile.
    """

    def __init__(self) -> None:
        self._life = 0
        self._unanswered = 0

    def hangs(self, life: int, *, answered: bool) -> bool:
        """Whether the broker, in its `life`th life, has just left one question too many unanswered."""
        if answered or life != self._life:
            self._life, self._unanswered = life, 0
        self._unanswered += not answered
        return self._unanswered >= UNANSWERED


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
