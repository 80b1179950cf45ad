"""A sampler process: takes requests from the broker, runs them, and stores one result for each.

A request runs once, whoever asks again: what is taken stands in a table that all sampler processes share, what is done
in the results. Nothing here outlives the process. The engine, and with it torch, comes with the first request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import nats.errors
from nats.aio.msg import Msg

from bus import subjects
from bus.connection import Bus
from bus.events import Failed, Outcome, Result, Sampled
from bus.results import Results
from bus.tables import SampleRow, Table
from observability.recorder import Recorder
from runtime.config import Sampler
from runtime.sampler import asking
from runtime.sampler.asking import Answer, Order
from runtime.sampler.contract import Engine, Finished, SampleRequest, SamplingRefused
from runtime.sampler.worker import Worker
from runtime.services import patiently

log = logging.getLogger(__name__)

CANCELLED = Failed(error="the request was cancelled", category="user")


class SamplerServer:
    """`make_engine` is called once, in a thread."""

    def __init__(
        self,
        bus: Bus,
        group: str,
        process: str,
        settings: Sampler,
        samples: Table[SampleRow],
        results: Results,
        recorder: Recorder,
        make_engine: Callable[[], Engine[Any]],
    ) -> None:
        self._bus, self._group, self._process = bus, group, process
        self._settings, self._samples, self._results = settings, samples, results
        self._recorder, self._make_engine = recorder, make_engine
        self._taken: dict[str, tuple[SampleRequest, float]] = {}
        """By request id, with the time at which it was taken."""
        self._loading = 0
        self._loader = ThreadPoolExecutor(1, "sampler-loader")
        self._worker: Worker[Any] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._generated = 0

    async def run(self) -> None:
        """Serve until cancelled; ends with the engine's error where it has one."""
        asked = await self._bus.nc.subscribe(
            subjects.sample(self._group), queue="samplers", cb=self._in_a_task(self._take)
        )
        told = await self._bus.nc.subscribe(
            subjects.sampler_process(self._group, self._process), cb=self._in_a_task(self._obey)
        )
        self._recorder.before_snapshot(self._measure)
        try:
            await self._broken
        finally:
            with contextlib.suppress(nats.errors.Error):  # the connection may be what has ended
                await asked.unsubscribe()
                await told.unsubscribe()
            if self._worker is not None:
                self._worker.stop()
            self._loader.shutdown(wait=False, cancel_futures=True)

    def _in_a_task(self, handle: Callable[[Msg], Any]) -> Callable[[Msg], Any]:
        async def start(msg: Msg) -> None:
            self._spawn(handle(msg))

        return start

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._break(error)

    def _break(self, error: BaseException) -> None:
        if not self._broken.done():
            self._broken.set_exception(error)

    async def _take(self, msg: Msg) -> None:
        request = msgspec.msgpack.decode(msg.data, type=SampleRequest)
        answer = await self._answer(request)
        await msg.respond(msgspec.msgpack.encode(answer))

    async def _answer(self, request: SampleRequest) -> Answer:
        if request.request_id in self._taken:
            return Answer(status="taken")
        if self._waiting >= self._settings.max_waiting:
            return Answer(status="full", detail=f"{self._waiting} sampling requests wait, the limit")
        self._taken[request.request_id] = (request, time.monotonic())
        if not await patiently(lambda: self._claimed(request)):
            self._taken.pop(request.request_id, None)
            return Answer(status="taken")
        self._loading += 1
        self._spawn(self._load(request))
        return Answer(status="taken")

    async def _claimed(self, request: SampleRequest) -> bool:
        """Whether it is ours to run: nobody else has it, and it has no result."""
        key, row = _key(request), SampleRow(tenant=request.tenant, process=self._process)
        if not await self._samples.create(key, row):
            found = await self._samples.get(key)
            if found is not None and found[0].process != self._process:
                if await asking.alive(self._bus, self._group, found[0].process):
                    return False
                if await self._samples.update(key, row, found[1]) is None:
                    return False
        if await self._results.get(request.tenant, request.sampling_session_id, request.seq_id) is None:
            return True
        await self._samples.forget(key)
        return False

    async def _load(self, request: SampleRequest) -> None:
        loop = asyncio.get_running_loop()
        try:
            if self._worker is None:
                engine = await loop.run_in_executor(self._loader, self._made)
                if self._worker is None:
                    self._worker = Worker(engine, self._finished, threads=self._settings.threads)
                    self._worker.ended.add_done_callback(
                        lambda ended: self._break(ended.exception() or _Ended())
                    )
            weights = await loop.run_in_executor(self._loader, self._worker.engine.weights, request)
            if request.request_id in self._taken:  # not cancelled meanwhile
                self._worker.add(request, weights, lambda refused: self._refuse(request, refused))
        except SamplingRefused as refused:
            self._refuse(request, refused)
        finally:
            self._loading -= 1

    def _made(self) -> Engine[Any]:
        if self._worker is not None:
            return self._worker.engine
        return self._make_engine()

    def _refuse(self, request: SampleRequest, refused: SamplingRefused) -> None:
        self._finished([Finished(request.request_id, Failed(error=str(refused), category=refused.category))])

    def _finished(self, finished: list[Finished]) -> None:
        for one in finished:
            if (taken := self._taken.get(one.request_id)) is not None:
                self._spawn(self._publish(*taken, one.outcome))

    async def _publish(self, request: SampleRequest, taken_at: float, outcome: Outcome) -> None:
        result = Result(
            request_id=request.request_id,
            model_id=request.sampling_session_id,
            seq_id=request.seq_id,
            outcome=outcome,
        )
        await patiently(lambda: self._results.publish(request.tenant, result))
        await patiently(lambda: self._samples.forget(_key(request)))
        self._taken.pop(request.request_id, None)
        done = "done" if isinstance(outcome, Sampled) else f"failed_{_who(outcome)}"
        self._recorder.inc("tinkerbus_sampler_requests_total", outcome=done)
        self._recorder.observe("tinkerbus_sampler_request_duration_seconds", time.monotonic() - taken_at)

    async def _obey(self, msg: Msg) -> None:
        order = msgspec.msgpack.decode(msg.data, type=Order)
        if order.cancel is not None and (taken := self._taken.get(order.cancel)) is not None:
            if self._worker is not None:
                self._worker.cancel(order.cancel)
            await self._publish(*taken, CANCELLED)
        await msg.respond(b"")

    @property
    def _waiting(self) -> int:
        """Requests that have not begun: their weights are being read, or they stand in the engine's queue."""
        return self._loading + (self._worker.engine.waiting if self._worker else 0)

    def _measure(self) -> None:
        engine = self._worker.engine if self._worker else None
        self._recorder.set("tinkerbus_sampler_running_sequences", engine.running if engine else 0)
        self._recorder.set("tinkerbus_sampler_waiting_requests", self._waiting)
        generated = engine.tokens if engine else 0
        self._recorder.inc("tinkerbus_sampler_tokens_total", generated - self._generated)
        self._generated = generated


class _Ended(RuntimeError):
    """The engine's thread ended by itself."""


def _key(request: SampleRequest) -> tuple[str, str]:
    return (request.sampling_session_id, str(request.seq_id))


def _who(outcome: Outcome) -> str:
    return "user" if isinstance(outcome, Failed) and outcome.category == "user" else "server"
