"""The end of sessions whose clients have gone without a word.

A heartbeat is a row that was written; how long ago is counted here, on a clock that runs only while the broker can be
asked, and starts anew with this process: no client is blamed for our own absence. A session with work in flight
lives on. Two of these at once, as during an update, do no harm: everything here may happen twice.
"""

from __future__ import annotations

import asyncio
import logging
import time

from bus.connection import BrokerError
from bus.events import UnloadModel
from bus.log import OpsLog
from bus.tables import ModelRow, Tables
from runtime import entries, session_end
from runtime.admission import Admission

log = logging.getLogger(__name__)

LONGEST_LOOK_S = 10.0
"""Between two looks, at most."""


class Silence:
    """Who has not been heard of for how long. The caller moves the clock."""

    def __init__(self, after_s: float) -> None:
        self.after_s = after_s
        self._now = 0.0
        self._heard: dict[str, float] = {}

    def pass_time(self, seconds: float) -> None:
        self._now += seconds

    def began(self, session_id: str) -> None:
        """Live; its time starts when it is first known."""
        self._heard.setdefault(session_id, self._now)

    def heard(self, session_id: str) -> None:
        """A sign of life, of a session that is known to be live."""
        if session_id in self._heard:
            self._heard[session_id] = self._now

    def ended(self, session_id: str) -> None:
        self._heard.pop(session_id, None)

    def due(self) -> list[str]:
        """Silent for the whole time."""
        return [name for name, heard in self._heard.items() if self._now - heard >= self.after_s]


class SessionExpiry:
    """Of all tenants' sessions. Holds nothing that a new one would not find out again."""

    def __init__(self, tables: Tables, log: OpsLog, admission: Admission, after_s: float) -> None:
        """`after_s` 0 ends none for its silence; models that a finished session left behind go in any case."""
        self._tables = tables
        self._log = log
        self._admission = admission
        self._wanted = after_s > 0
        self._silence = Silence(after_s)
        self._every_s = min(LONGEST_LOOK_S, after_s / 10) if self._wanted else LONGEST_LOOK_S
        self._sessions_read = 0
        self._heartbeats_read = 0

    async def run(self) -> None:
        """For ever."""
        looked: float | None = None
        while True:
            began = time.monotonic()
            try:
                # Of a long pause, as of a machine that slept, a client has had no part.
                self._silence.pass_time(0.0 if looked is None else min(began - looked, 2 * self._every_s))
                await self._look()
                looked = began
            except BrokerError as error:
                looked = None
                log.warning("the expiry of sessions has to wait: %s", error)
            await asyncio.sleep(self._every_s)

    async def _look(self) -> None:
        """Raises BrokerError."""
        sessions, read = await self._tables.sessions.since(self._sessions_read)
        finished = set()
        for key, row in sessions.items():
            if row is not None and row.status == "live":
                self._silence.began(str(key))
            else:
                self._silence.ended(str(key))
                finished.add(str(key))
        if finished:
            await self._unload_what_is_left(finished)
        self._sessions_read = read
        heartbeats, self._heartbeats_read = await self._tables.heartbeats.since(self._heartbeats_read)
        for key in heartbeats:
            self._silence.heard(str(key))
        if self._wanted:
            for session_id in self._silence.due():
                await self._end(session_id)

    async def _end(self, session_id: str) -> None:
        if await self._works(session_id):
            self._silence.heard(session_id)
            return
        log.info("session %s has had no heartbeats for %g s and ends", session_id, self._silence.after_s)
        await session_end.end(self._tables, session_id, self._unload, reason="expired")
        self._silence.ended(session_id)

    async def _works(self, session_id: str) -> bool:
        """Whether an operation of its models, or a request to its samplers, is without a result."""
        for key, row in (await self._tables.models.all()).items():
            if row.session_id == session_id and await self._admission.waiting(str(key)):
                return True
        for key, sampler in (await self._tables.samplers.all()).items():
            if sampler.session_id == session_id and await self._tables.samples.keys((str(key),)):
                return True
        return False

    async def _unload_what_is_left(self, finished: set[str]) -> None:
        """Models whose session ended while they were being made, or whose end we did not live to see."""
        for key, row in (await self._tables.models.all()).items():
            if row.session_id in finished and row.status in ("creating", "live"):
                await self._unload(str(key), row)

    async def _unload(self, model_id: str, row: ModelRow) -> None:
        end = entries.of_op(row.tenant, model_id, None, UnloadModel())
        await self._log.append(end, trimmed_below=row.trimmed_below)
