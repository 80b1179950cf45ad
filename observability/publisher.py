"""Sends a recorder's snapshots to whoever exports them, once a second. Nothing waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import nats.errors

from bus import subjects
from bus.connection import Bus, MessageTooLarge
from observability.recorder import Recorder
from observability.snapshot import encode

log = logging.getLogger(__name__)

WHOLE_EVERY = 5
"""Of so many snapshots one holds all series; those between, what has changed since."""


class MetricsPublisher:
    """Publishes until `stop`, which sends the last state. While the broker is away it skips: totals lose nothing."""

    def __init__(self, bus: Bus, recorder: Recorder, interval_s: float = 1.0) -> None:
        self._bus = bus
        self._recorder = recorder
        self._interval_s = interval_s
        self._subject = subjects.metrics(recorder.process)
        self._task: asyncio.Task[None] | None = None
        self._complained = False
        self._published = 0

    async def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"metrics of {self._recorder.process}")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
            await self.publish()
            with contextlib.suppress(nats.errors.Error):
                await self._bus.nc.flush(timeout=1)

    async def publish(self) -> None:
        """Send one snapshot now."""
        if not self._bus.connected:
            return
        whole = self._published % WHOLE_EVERY == 0
        self._published += 1
        body = encode(self._recorder.snapshot() if whole else self._recorder.changes())
        try:
            self._bus.check_size(body, "a snapshot of metrics")
            await self._bus.nc.publish(self._subject, body)
        except (MessageTooLarge, nats.errors.Error) as error:
            if not self._complained:
                log.warning("metrics of %s are not published: %s", self._recorder.process, error)
            self._complained = True
        else:
            self._complained = False

    async def __aenter__(self) -> MetricsPublisher:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def _run(self) -> None:
        while True:
            try:
                await self.publish()
            except Exception:  # a gauge that cannot be read must not end all metrics
                log.exception("a snapshot of the metrics of %s failed", self._recorder.process)
            await asyncio.sleep(self._interval_s)
