"""What stands behind the wire in these tests: a dispatcher without a model, and a server around the ingress.

The stand-in runs each model's operations in `seq_id` order, answers with numbers that the tests can work out, and
writes down what it ran.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import uvicorn

from bus.backlog import Backlog
from bus.connection import Bus, Credentials, connect
from bus.errors import CodecError
from bus.events import (
    CreateModel,
    Datum,
    Failed,
    ForwardBackward,
    ForwardBackwardDone,
    LoadWeights,
    ModelCreated,
    ModelUnloaded,
    Op,
    OptimStep,
    OptimStepDone,
    Outcome,
    Refused,
    Result,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
    Tensor,
    UnloadModel,
    WeightsLoaded,
    WeightsSaved,
)
from bus.ledger import Ledger
from bus.log import LogEntry, OpsLog
from bus.results import Results
from bus.tables import GroupRow, Tables
from runtime.admission import REFUSING_S, Admission
from runtime.config import Settings
from runtime.ingress.app import build
from runtime.ingress.deps import Deps
from runtime.ingress.heartbeats import Heartbeats
from runtime.ingress.readiness import readiness
from runtime.keys import Keys
from runtime.unfinished import Unfinished, report
from tests.bus.waiting import until

BASE_MODEL = "tiny"
MODEL_DIR = "/models/tiny"
CONTEXT = 512


def ints(tensor: Tensor) -> list[int]:
    assert isinstance(tensor.data, bytes)
    return list(
        struct.unpack(
            f"<{len(tensor.data) // (8 if tensor.dtype == 'int64' else 4)}{'q' if tensor.dtype == 'int64' else 'i'}",
            tensor.data,
        )
    )


def logprobs_of(datum: Datum) -> list[float]:
    """The stand-in's logprob of target t is −t/8: exact in float32, and different for every token."""
    targets = datum.loss_fn_inputs["target_tokens"]
    assert isinstance(targets, Tensor)
    return [-token / 8 for token in ints(targets)]


class StandInDispatcher:
    """Runs what is on the log, in order, one model at a time."""

    def __init__(self, log: OpsLog, results: Results, tables: Tables, ledger: Ledger) -> None:
        self._log, self._results, self._tables, self._ledger = log, results, tables, ledger
        self._unfinished = Unfinished()
        self._turns: asyncio.Queue[LogEntry] = asyncio.Queue()
        self._next: dict[str, int] = defaultdict(int)
        self._waiting: dict[str, dict[int, LogEntry]] = defaultdict(dict)
        self.ran: list[tuple[str, int | None, str]] = []
        """(model_id, seq_id, verb), in the order of running."""
        self.asked: dict[tuple[str, int | None], Op] = {}
        """What saves, loads and creations asked for."""
        self.go = asyncio.Event()
        """Cleared, nothing runs."""
        self.go.set()

    @property
    def position(self) -> int:
        """Of the last entry that it has read."""
        return self._unfinished.position

    async def announce(self, status: Any = "ready") -> None:
        row = GroupRow(
            status=status,
            base_model=BASE_MODEL,
            model_dir=MODEL_DIR,
            context_length=CONTEXT,
            vocab_size=320,
            arch="qwen3",
        )
        await self._tables.groups.put(self._log.group, row)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(report(self._tables.backlogs, self._log.group, self._unfinished))
            tasks.create_task(self._read())
            while True:
                await self._run(await self._turns.get())

    async def _read(self) -> None:
        async for entry in self._log.read():
            self._unfinished.read(entry)
            if entry.seq_id is None:
                self._turns.put_nowait(entry)
                continue
            self._waiting[entry.model_id][entry.seq_id] = entry
            while (ready := self._waiting[entry.model_id].pop(self._next[entry.model_id], None)) is not None:
                self._turns.put_nowait(ready)
                self._next[entry.model_id] += 1

    async def _run(self, entry: LogEntry) -> None:
        await self.go.wait()
        outcome = await self._outcome(entry)
        self.ran.append((entry.model_id, entry.seq_id, entry.verb))
        result = Result(
            request_id=entry.request_id, model_id=entry.model_id, seq_id=entry.seq_id, outcome=outcome
        )
        await self._results.publish(entry.tenant, result)
        assert entry.position is not None
        await self._ledger.record(entry.model_id, entry.seq_id, entry.body_hash, "done", entry.position)
        self._unfinished.finish(entry)

    async def _outcome(self, entry: LogEntry) -> Outcome:
        try:
            op = (await self._log.whole(entry)).op()
        except CodecError as error:
            return Failed(error=str(error), category="user", field=error.field)
        match op:
            case Refused():
                return Failed(error=op.error, category="user", field=op.field)
            case CreateModel():
                self.asked[entry.model_id, entry.seq_id] = op
                if op.start is None and op.base_model != BASE_MODEL:
                    await self._set_status(entry.model_id, "failed")
                    return Failed(error=f"base_model {op.base_model!r} is not served", category="user")
                await self._set_status(entry.model_id, "live")
                return ModelCreated(model_id=entry.model_id, base_model=op.base_model, lora=op.lora)
            case ForwardBackward():
                return self._scored(op)
            case OptimStep():
                return OptimStepDone(
                    metrics={"learning_rate": op.adam_params.learning_rate, "norm": float("inf")}
                )
            case SaveWeights() | SaveWeightsExternal() | SaveWeightsForSampler():
                self.asked[entry.model_id, entry.seq_id] = op
                kind = {SaveWeights: "weights", SaveWeightsExternal: "external_weights"}
                path = f"tinker://{entry.model_id}/{kind.get(type(op), 'sampler_weights')}/{op.name}"
                if isinstance(op, SaveWeightsForSampler) and op.sampling_session_id is not None:
                    return WeightsSaved(sampling_session_id=op.sampling_session_id)
                return WeightsSaved(path=path, size_bytes=12 if isinstance(op, SaveWeightsExternal) else None)
            case LoadWeights():
                self.asked[entry.model_id, entry.seq_id] = op
                return WeightsLoaded(path=op.checkpoint.path, model_id=entry.model_id)
            case UnloadModel():
                await self._set_status(entry.model_id, "unloaded")
                return ModelUnloaded(model_id=entry.model_id)

    @staticmethod
    def _scored(op: ForwardBackward) -> Outcome:
        if op.loss.name == "nonsense":
            return Failed(error="loss.name 'nonsense' is not registered", category="user", field="loss.name")
        rows = [logprobs_of(datum) for datum in op.data]
        outputs = tuple(
            {"logprobs": Tensor(dtype="float32", shape=(len(row),), data=struct.pack(f"<{len(row)}f", *row))}
            for row in rows
        )
        return ForwardBackwardDone(
            loss_fn_outputs=outputs,
            metrics={"loss:sum": -sum(map(sum, rows)), "forward_only:max": float(op.forward_only)},
        )

    async def _set_status(self, model_id: str, status: Any) -> None:
        found = await self._tables.models.get(model_id)
        assert found is not None
        await self._tables.models.put(model_id, msgspec.structs.replace(found[0], status=status))


class _Server(uvicorn.Server):
    """uvicorn that leaves the test's signal handlers alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass
class Replica:
    """One ingress process, in all but the process."""

    url: str
    deps: Deps


@dataclass
class Service:
    """A broker connection, a stand-in dispatcher and any number of ingress replicas over one group."""

    broker_url: str
    credentials: Credentials
    settings: Settings
    keys: Keys
    group: str
    bus: Bus
    log: OpsLog
    results: Results
    tables: Tables
    ledger: Ledger
    dispatcher: StandInDispatcher
    stack: contextlib.AsyncExitStack = field(repr=False)

    async def quiet(self) -> None:
        """Returns when the report says that nothing waits, and every server would read it anew before it refuses."""

        async def nothing_waits() -> bool:
            found = await self.tables.backlogs.get(self.group)
            return found is not None and found[0].position == self.dispatcher.position and not found[0].models

        await until(nothing_waits)
        await asyncio.sleep(1.5 * REFUSING_S)

    async def replica(self, settings: Settings | None = None, **changes: Any) -> Replica:
        """Start one more ingress, with a broker connection of its own."""
        bus = await connect(self.broker_url, self.credentials, name="ingress")
        self.stack.push_async_callback(bus.close)
        tables, ledger = await Tables.open(bus), await Ledger.open(bus, self.group)
        settings = settings or self.settings
        backlog = await Backlog.open(bus, tables.backlogs, self.group)
        deps = Deps(
            settings=settings,
            bus=bus,
            log=OpsLog(bus, self.group),
            results=Results(bus),
            tables=tables,
            ledger=ledger,
            admission=Admission(settings.limits, backlog, ledger),
            keys=self.keys,
            heartbeats=Heartbeats(tables.heartbeats, settings.sessions.expire_after_s),
            ready=readiness(tables, self.group),
        )
        deps = replace(deps, **changes)
        url = await self.stack.enter_async_context(serving(deps))
        return Replica(url, deps)


@contextlib.asynccontextmanager
async def serving(deps: Deps) -> AsyncIterator[str]:
    """The URL of the ingress, served on a free port while the context lasts."""
    config = uvicorn.Config(
        build(deps), port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=1
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(10):
            while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
                await asyncio.sleep(0.005)
        host, port = server.servers[0].sockets[0].getsockname()[:2]
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        await task


@contextlib.asynccontextmanager
async def running(coroutine: Any) -> AsyncIterator[None]:
    """A background task; its failure fails the test."""
    task = asyncio.create_task(coroutine)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
