"""What one tenant's full queue costs another tenant.

    python -m benchmarks.fairness --seconds 30

starts `tinkerbus up` with a model of one layer, whose smallest call takes less than 50 ms of one core, and with two
tenants, and measures, all in one run:

1. one call of `--large` datums, alone, and one of a single datum, alone;
2. a tenant whose queue is full of large calls beside one that has a single datum scored every 50 ms, whether or not
   the ones before have been answered: how long those take, against one large call. On a machine where such a call
   takes more than 25 ms this asks for more than half of the ranks, and a queue grows at any fair share;
3. both with full queues, of large calls and of calls a quarter as large: the rank time each gets.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from bus import client as events
from bus.client import Client, LoraConfig, Model
from bus.events import Datum
from runtime.bench.workload import model_folder
from tests.support.service import Service, started

MODEL = "one-layer"
PERIOD_S = 0.05
OUTSTANDING = 6
"""Calls of a full queue: so many at a time have no result yet."""
LIMIT_P99 = 1.5
"""Of a small call beside large ones, in large calls alone."""
LIMIT_SHARE = 0.10
"""How far from a half a tenant's share of the rank time may be, as a part of that half."""


def batch(datums: int, tokens: int) -> list[Datum]:
    random = np.random.default_rng(datums)
    drawn = random.integers(0, 256, (datums, tokens + 1))
    return [
        events.datum(row[:-1], target_tokens=row[1:], weights=np.ones(tokens, np.float32)) for row in drawn
    ]


async def call(model: Model, data: list[Datum]) -> float:
    """Seconds from sending it to its result. A single datum is scored, larger calls train."""
    began = time.monotonic()
    await (await model.forward_backward(data, forward_only=len(data) == 1))
    return time.monotonic() - began


async def alone(model: Model, data: list[Datum], times: int) -> float:
    """Seconds that one call takes, the median of some after one that warms up."""
    await call(model, data)
    return statistics.median([await call(model, data) for _ in range(times)])


async def full_queue(model: Model, data: list[Datum], stop: asyncio.Event, answered: list[float]) -> None:
    """Keep so many calls on their way, and note when each is answered."""

    async def one_after_the_other() -> None:
        while not stop.is_set():
            await call(model, data)
            if not stop.is_set():
                answered.append(time.monotonic())

    async with asyncio.TaskGroup() as tasks:
        for _ in range(OUTSTANDING):
            tasks.create_task(one_after_the_other())


async def every_50_ms(model: Model, data: list[Datum], seconds: float) -> list[float]:
    """Seconds of each call, sent at its time whatever became of those before."""
    began = time.monotonic()
    sent = []
    async with asyncio.TaskGroup() as tasks:
        for number in range(int(seconds / PERIOD_S)):
            await asyncio.sleep(max(0.0, began + number * PERIOD_S - time.monotonic()))
            sent.append(tasks.create_task(call(model, data)))
    return [task.result() for task in sent]


async def measure(service: Service, passwords: dict[str, str], seconds: float, large: int) -> bool:
    async with (
        await events.connect(service.nats, tenant="greedy", password=passwords["greedy"]) as greedy,
        await events.connect(service.nats, tenant="modest", password=passwords["modest"]) as modest,
    ):
        return await _measure(greedy, modest, seconds, large)


async def _measure(greedy: Client, modest: Client, seconds: float, large: int) -> bool:
    lora = LoraConfig(rank=8)
    first = await greedy.create_model("greedy", base_model=MODEL, lora=lora)
    second = await modest.create_model("modest", base_model=MODEL, lora=lora)
    whole, quarter, single = batch(large, 64), batch(large // 4, 64), batch(1, 16)
    whole_s, quarter_s, single_s = (
        await alone(first, whole, 5),
        await alone(second, quarter, 10),
        await alone(second, single, 40),
    )
    print(
        f"alone: {large} datums {whole_s:.3f} s, {large // 4} datums {quarter_s:.3f} s, 1 datum {single_s:.3f} s"
    )

    stop, answered = asyncio.Event(), []
    busy = asyncio.create_task(full_queue(first, whole, stop, answered))
    await asyncio.sleep(2 * whole_s)
    took = sorted(await every_50_ms(second, single, seconds))
    stop.set()
    await busy
    p50, p99 = took[len(took) // 2], took[int(0.99 * len(took))]
    print(
        f"one datum every 50 ms beside a full queue: p50 {p50:.3f} s, p99 {p99:.3f} s, worst {took[-1]:.3f} s; "
        f"p99 is {p99 / whole_s:.2f} large calls (limit {LIMIT_P99})"
    )

    stop, greedys, modests = asyncio.Event(), [], []
    both = [
        asyncio.create_task(full_queue(first, whole, stop, greedys)),
        asyncio.create_task(full_queue(second, quarter, stop, modests)),
    ]
    await asyncio.sleep(2 * whole_s)
    greedys.clear()
    modests.clear()
    await asyncio.sleep(seconds)
    stop.set()
    times = len(greedys) * whole_s, len(modests) * quarter_s
    await asyncio.gather(*both)
    share = times[0] / sum(times)
    print(
        f"both with full queues: {len(greedys)} and {len(modests)} calls, "
        f"{100 * share:.1f}% and {100 - 100 * share:.1f}% of the rank time (limit 50 ± {50 * LIMIT_SHARE:.0f})"
    )
    return p99 <= LIMIT_P99 * whole_s and abs(share - 0.5) <= 0.5 * LIMIT_SHARE


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--large", type=int, default=200)
    chosen = parser.parse_args()
    passwords = {name: f"{name}-password" for name in ("greedy", "modest")}
    with tempfile.TemporaryDirectory(prefix="tinkerbus-fairness-") as scratch:
        config = Path(scratch, "tinkerbus.toml")
        config.write_text(
            "".join(f"[tenants.{name}]\nnats_password = {json.dumps(p)}\n" for name, p in passwords.items())
        )
        model = model_folder(Path(scratch, MODEL), layers=1)
        options = ("--model", str(model), "--config", str(config))
        with started(Path(scratch, "data"), *options) as service:
            good = asyncio.run(measure(service, passwords, chosen.seconds, chosen.large))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
