"""What the log costs: bytes and time of a step, replay against live work, idle models, and the start on a long log.

    python -m benchmarks.log_cost                # every part, some minutes each
    python -m benchmarks.log_cost --only replay

Every part starts `tinkerbus up` on a folder of its own; `--scale 0.1` makes all of them a tenth as long, to try them.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import threading
import time
import urllib.error
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from bus import client as events
from bus import subjects
from bus.broker_folder import find_running
from bus.client import LoraConfig, Model, Pending
from bus.codec import encode
from bus.connection import Bus, connect
from bus.embedded import EmbeddedBroker
from bus.events import CreateModel, Datum, OptimStep, Result
from bus.ledger import Ledger
from bus.log import LogEntry, OpsLog, entry
from bus.results import Results
from bus.streams import ensure_streams
from bus.tables import ModelRow, Tables
from runtime.bench.workload import VOCAB, model_folder
from runtime.config import DEFAULT_TENANT, Settings, stream_limits
from runtime.service import BROKER_FOLDER, GROUP
from tests.support.service import Service, started

Rows = list[tuple[str, str]]

STREAMS = {
    "log": subjects.OPS_STREAM,
    "bodies apart": subjects.BLOB_STREAM,
    "results": subjects.RESULTS_STREAM,
    "ledger": "KV_tinker_ledger",
}
IN_FLIGHT = 256


def say(word: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {word}", file=sys.stderr, flush=True)


def batch(datums: int, tokens: int) -> list[Datum]:
    drawn = np.random.default_rng(7).integers(0, VOCAB, (datums, tokens + 1))
    return [
        events.datum(row[:-1], target_tokens=row[1:], weights=np.ones(tokens, np.float32)) for row in drawn
    ]


async def train(model: Model, data: list[Datum], steps: int) -> float:
    """Seconds of so many steps, all sent ahead."""
    began, pending = time.monotonic(), list[Pending]()
    for _ in range(steps):
        pending += [await model.forward_backward(data), await model.optim_step(learning_rate=1e-3)]
    for call in pending:
        await call
    return time.monotonic() - began


async def latency(model: Model, data: list[Datum], calls: int) -> float:
    """Median milliseconds of one call, each awaited."""
    took = []
    for _ in range(calls):
        began = time.monotonic()
        await (await model.forward_backward(data, forward_only=True))
        took.append(1e3 * (time.monotonic() - began))
    return statistics.median(took)


async def at_most(limit: int, work: Iterable[Awaitable[object]]) -> None:
    """All of it, `limit` at a time."""
    room = asyncio.Semaphore(limit)

    async def one(part: Awaitable[object]) -> None:
        try:
            await part
        finally:
            room.release()

    async with asyncio.TaskGroup() as tasks:
        for part in work:
            await room.acquire()
            tasks.create_task(one(part))


async def as_server(data: Path) -> Bus:
    endpoint = find_running(data / BROKER_FOLDER)
    assert endpoint is not None, f"no broker serves on {data}"
    return await connect(endpoint.url, endpoint.credentials, name="benchmark")


async def client_of(service: Service) -> events.Client:
    return await events.connect(service.nats, tenant=DEFAULT_TENANT, password=service.nats_password)


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def snapshots_in(folder: Path) -> set[Path]:
    return {manifest.parent for manifest in folder.rglob("manifest.json")}


# ---------------------------------------------------------------------------------------- bytes and time of a step


def step(scratch: Path, scale: float) -> Rows:
    """Growth of streams and snapshots over the steps, and the time of the three writes of each operation."""
    steps = max(4, int(40 * scale))  # in less than `recovery.replay_budget_s`: nothing is trimmed meanwhile
    folder = model_folder(scratch / "bench")

    async def work(service: Service) -> Rows:
        async with await client_of(service) as client, await as_server(service.data) as bus:
            model = await client.create_model("step", base_model="bench", lora=LoraConfig(rank=8, seed=1))
            data = batch(32, 128)
            await train(model, data, 2)
            before = {name: await stored(bus, stream) for name, stream in STREAMS.items()}
            say(f"{steps} steps of 32 x 128 tokens")
            seconds = await train(model, data, steps)
            after = {name: await stored(bus, stream) for name, stream in STREAMS.items()}
            rows = [
                (f"{name}, bytes a step", f"{(after[name] - before[name]) / steps:,.0f}") for name in STREAMS
            ]
            say("on to the next snapshot")
            size = await snapshot_bytes(service.data / "snapshots", lambda: train(model, data, 8))
            each = Settings().recovery.replay_budget_s / (seconds / steps)
            rows += [
                ("a snapshot, bytes", f"{size:,.0f}"),
                (f"of it a step, one snapshot in {each:.0f} steps", f"{size / each:,.0f}"),
                ("a step, ms", f"{1e3 * seconds / steps:.1f}"),
            ]
            # The newest operations: what is behind a snapshot may be trimmed.
            entries = [found async for found in OpsLog(bus, GROUP).so_far(model_id="step")]
            chosen = [found for found in entries if found.seq_id][-2 * min(steps, 20) :]
            whole = [await OpsLog(bus, GROUP).whole(found) for found in chosen]
            results = Results(bus)
            bodies = [await results.get(DEFAULT_TENANT, "step", found.seq_id) for found in whole]
            answers = [found.result() for found in bodies if found is not None]
            await results.close()
            assert len(answers) == len(whole), "every operation has its result"
        milliseconds = await writes(scratch / "again", whole, answers)
        total = sum(milliseconds.values())
        rows += [(f"{name}, ms a step", f"{value:.2f}") for name, value in milliseconds.items()]
        rows.append(("all three, of a step", f"{total / (1e3 * seconds / steps):.2%}"))
        return rows

    with started(scratch / "data", "--model", str(folder)) as service:
        return asyncio.run(work(service))


async def snapshot_bytes(folder: Path, work: Callable[[], Awaitable[object]]) -> int:
    """Of the next snapshot that is taken, working on until there is one; 0 where none comes."""
    before = snapshots_in(folder)
    for _ in range(20):
        await work()
        if new := snapshots_in(folder) - before:
            return folder_bytes(new.pop())
    return 0


async def stored(bus: Bus, stream: str) -> int:
    return int((await bus.js.stream_info(stream)).state.bytes)


async def writes(folder: Path, entries: list[LogEntry], answers: list[Result]) -> dict[str, float]:
    """The same operations and results once more, on a broker of their own: milliseconds a step, of each write."""
    say(f"{len(entries)} operations written once more")
    spent = {"append and its ack": 0.0, "result and its ack": 0.0, "ledger row and its ack": 0.0}

    async def timed(name: str, write: Awaitable[object]) -> None:
        began = time.perf_counter()
        await write
        spent[name] += time.perf_counter() - began

    with EmbeddedBroker(folder) as broker:
        async with await connect(broker.url, broker.credentials, name="benchmark") as bus:
            await ensure_streams(bus, **stream_limits(Settings()))
            ledger, results = await Ledger.open(bus, GROUP), Results(bus)
            log = OpsLog(bus, GROUP, ledger)
            for found, answer in zip(entries, answers, strict=True):
                await timed("append and its ack", log.append(replace(found, position=None)))
                await timed("result and its ack", results.publish(found.tenant, answer))
                row = ledger.record(
                    found.model_id, found.seq_id, found.body_hash, "done", found.position or 0
                )
                await timed("ledger row and its ack", row)
            await results.close()
    steps = len(entries) / 2
    return {name: 1e3 * seconds / steps for name, seconds in spent.items()}


# ----------------------------------------------------------------------------------------------------- replay


def replay(scratch: Path, scale: float) -> Rows:
    """Operations a second as they were replayed after `kill -9` of every process, against live."""
    steps = max(4, int(80 * scale))
    folder = model_folder(scratch / "bench")
    environment = {"TINKERBUS_RECOVERY__REPLAY_BUDGET_S": "1e6"}  # no snapshot: all of it is replayed

    async def live(service: Service) -> float:
        async with await client_of(service) as client:
            model = await client.create_model("replay", base_model="bench", lora=LoraConfig(rank=8, seed=1))
            data = batch(32, 128)
            await train(model, data, 2)
            say(f"{steps} steps live")
            return 2 * steps / await train(model, data, steps)

    with started(scratch / "data", "--model", str(folder), environment=environment) as service:
        alive = asyncio.run(live(service))
        service.kill_tree()
        say("killed; started again")
        began = time.monotonic()
        watch = ReplayWatch(service)
        service.start()
        watch.stop()
        ready = time.monotonic() - began
    operations = 2 * (steps + 2) + 1
    again = watch.rate()
    return [
        ("live, operations/s", f"{alive:.2f}"),
        ("replayed, operations/s", "too few to tell" if again is None else f"{again:.2f}"),
        ("replayed / live", "" if again is None else f"{again / alive:.2f}"),
        (f"ready again after {operations} operations, s", f"{ready:.1f}"),
    ]


class ReplayWatch:
    """How many operations a starting service has replayed, seen from outside a few times a second."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._stop = threading.Event()
        self.samples: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.wait(3)  # what is exported lags by a second or two
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.2):
            try:
                value = self._service.metric("tinkerbus_replayed_operations_total")
            except (urllib.error.URLError, OSError):
                continue
            if value and (not self.samples or value != self.samples[-1][1]):
                self.samples.append((time.monotonic(), value))

    def rate(self) -> float | None:
        return rate(self.samples)


def rate(samples: list[tuple[float, float]]) -> float | None:
    """Of a counter sampled when it changed, from the first sample to the last; None below two."""
    if len(samples) < 2:
        return None
    (t0, n0), (t1, n1) = samples[0], samples[-1]
    return (n1 - n0) / (t1 - t0)


# ------------------------------------------------------------------------------------------------- idle models


def idle(scratch: Path, scale: float) -> Rows:
    """The p50 of one call of one model, alone and beside idle ones."""
    models, calls = max(8, int(500 * scale)), max(20, int(400 * scale))
    environment = {"TINKERBUS_LIMITS__MAX_RESIDENT_MODELS": "16"}

    async def work(service: Service) -> tuple[float, float]:
        async with await client_of(service) as client:
            lora = LoraConfig(rank=1, seed=1)
            model = await client.create_model("active", base_model="tiny", lora=lora)
            data = [events.datum(np.arange(32), target_tokens=np.arange(32), weights=np.ones(32, np.float32))]
            await latency(model, data, calls // 4)
            alone = await latency(model, data, calls)
            say(f"{models} idle models")
            began = time.monotonic()
            create = (client.create_model(f"idle-{n}", base_model="tiny", lora=lora) for n in range(models))
            await at_most(8, create)
            say(f"created in {time.monotonic() - began:.0f} s")
            await latency(model, data, calls // 4)  # it may have been unloaded meanwhile
            return alone, await latency(model, data, calls)

    with started(scratch / "data", environment=environment) as service:
        alone, beside = asyncio.run(work(service))
    return [
        ("p50 alone, ms", f"{alone:.1f}"),
        (f"p50 beside {models} idle models, ms", f"{beside:.1f}"),
        ("ratio (aim 1.10)", f"{beside / alone:.2f}"),
    ]


# ------------------------------------------------------------------------------------------------- a long log


def start(scratch: Path, scale: float) -> Rows:
    """Seconds from the command to the ready line, on an empty log and on one of many events that are trimmed."""
    count, models = max(1000, int(100_000 * scale)), 100
    folder = model_folder(scratch / "one-layer", layers=1)
    long, empty = scratch / "long", scratch / "empty"
    began = time.monotonic()
    asyncio.run(write_trimmed(long, count, models))
    say(f"{count} events of {models} models written and trimmed in {time.monotonic() - began:.0f} s")
    took: dict[Path, list[float]] = {long: [], empty: []}
    for number in range(max(1, round(3 * scale))):
        for data in (empty, long):
            began = time.monotonic()
            with started(data, "--model", str(folder)):
                took[data].append(time.monotonic() - began)
            say(f"{data.name} log, start {number + 1}: {took[data][-1]:.1f} s")
    plain, slow = statistics.median(took[empty]), statistics.median(took[long])
    return [
        ("start on an empty log, s", f"{plain:.1f}"),
        (f"start on a log of {count} trimmed events, s", f"{slow:.1f}"),
        ("longer by (aim 20%)", f"{slow / plain - 1:.1%}"),
    ]


async def write_trimmed(data: Path, count: int, models: int) -> None:
    """What models that have ended leave: rows of the ledger and of the models, and a log of its last event alone."""
    with EmbeddedBroker(data / BROKER_FOLDER, sync_interval="2m") as broker:
        async with await connect(broker.url, broker.credentials, name="benchmark") as bus:
            await ensure_streams(bus, **stream_limits(Settings()))
            tables, ledger = await Tables.open(bus), await Ledger.open(bus, GROUP)
            log = OpsLog(bus, GROUP, ledger)
            each = count // models

            async def one(model_id: str, seq_id: int) -> None:
                op = OptimStep() if seq_id else CreateModel(base_model="one-layer", lora=LoraConfig(rank=1))
                verb = "optim_step" if seq_id else "create_model"
                made = entry(DEFAULT_TENANT, model_id, seq_id, verb, encode(op))
                done = await log.append(made)
                await ledger.record(model_id, seq_id, made.body_hash, "done", done.position)

            names = [f"ended-{number}" for number in range(models)]
            await at_most(IN_FLIGHT, (one(name, seq_id) for seq_id in range(each) for name in names))
            last = await log.last_position()
            for name in names:
                row = ModelRow(
                    tenant=DEFAULT_TENANT,
                    base_model="one-layer",
                    created_at=time.time(),
                    lora=LoraConfig(rank=1),
                    status="unloaded",
                    trimmed_below=each,
                )
                await tables.models.put(name, row)
                await log.trim(name, last, each)


PARTS: dict[str, Callable[[Path, float], Rows]] = {
    "step": step,
    "replay": replay,
    "idle": idle,
    "start": start,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=list(PARTS), help="one part")
    parser.add_argument("--scale", type=float, default=1.0, help="how long, as a part of the usual length")
    chosen = parser.parse_args()
    for name, part in PARTS.items():
        if chosen.only in (None, name):
            with tempfile.TemporaryDirectory(prefix=f"tinkerbus-log-cost-{name}-") as scratch:
                say(f"part {name}")
                began = time.monotonic()
                rows = part(Path(scratch), chosen.scale)
                say(f"part {name} took {time.monotonic() - began:.0f} s")
            print(f"| {name} | |\n|---|---|")
            for label, value in rows:
                print(f"| {label} | {value} |")
            print(flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
