"""One run of the benchmark: rounds of the service between runs of the bare loop, so that a drifting machine cancels."""

from __future__ import annotations

import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from actors import device
from runtime.bench.clients import through_nats, through_sdk
from runtime.bench.timing import Figures, combined
from runtime.bench.workload import Workload, model_folder
from runtime.demo.server import starting


@dataclass(frozen=True, slots=True)
class Row:
    """One way of training."""

    figures: Figures
    ratio: float
    """Of its tokens per second to those of the fastest bare loop."""


def bare(folder: Path, threads: int, work: Workload) -> list[Figures]:
    """Figures of every packing, from a process of its own."""
    sizes = ",".join(str(size) for size in dataclasses.astuple(work))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "runtime.bench.bare", str(folder), str(threads), sizes],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, **device.environment(threads)},
    )
    return [msgspec.json.decode(line, type=Figures) for line in done.stdout.splitlines()]


@dataclass(slots=True)
class Round:
    """What one round measured: the service between two runs of the bare loop."""

    before: list[Figures]
    service: list[Figures]
    after: list[Figures]


def run(work: Workload, rounds: int, say: Callable[[str], None]) -> list[Row]:
    """A row for each bare packing, for the SDK and for NATS.

    The run of the bare loop behind a round is the one before the next.
    """
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    threads = os.cpu_count() or 1
    with tempfile.TemporaryDirectory(prefix="tinkerbus-bench-") as scratch:
        folder = model_folder(Path(scratch) / "bench-model")
        say("bare Megatron loop")
        before, measured = bare(folder, threads, work), []
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            service = _service(folder, Path(scratch) / f"data-{number}", work, say)
            say("bare Megatron loop")
            after = bare(folder, threads, work)
            measured.append(Round(before, service, after))
            before = after
    return table(measured)


def _service(folder: Path, data: Path, work: Workload, say: Callable[[str], None]) -> list[Figures]:
    with starting(str(folder), data, say) as server:
        ready = server.ready()
        say("through the SDK")
        sdk = through_sdk(ready.http, ready.api_key, ready.base_model, work)
        say("through NATS")
        nats = through_nats(ready.nats, ready.tenant, ready.nats_password, ready.base_model, work)
        return [sdk, nats]


def table(rounds: Sequence[Round]) -> list[Row]:
    """Medians over the rounds. Ratios are to the fastest bare packing of the same round, before and behind it."""
    rows: dict[str, list[tuple[Figures, float]]] = {}
    for measured in rounds:
        plain = [combined(pair) for pair in zip(measured.before, measured.after, strict=True)]
        best = max(figures.tokens_per_s for figures in plain)
        for figures in (*plain, *measured.service):
            rows.setdefault(figures.way, []).append((figures, figures.tokens_per_s / best))
    return [
        Row(combined([figures for figures, _ in row]), statistics.median(ratio for _, ratio in row))
        for row in rows.values()
    ]
