"""One run of the benchmark: the bare loop before and after the service, so that a drifting machine shows."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from actors import device
from runtime.bench.clients import through_nats, through_sdk
from runtime.bench.timing import Figures, combined
from runtime.bench.workload import Workload, model_folder
from runtime.demo.server import starting


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


def run(work: Workload, rounds: int, say: Callable[[str], None]) -> Iterator[Figures]:
    """Figures of each bare packing, of the SDK and of NATS: medians over the rounds."""
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    threads = os.cpu_count() or 1
    with tempfile.TemporaryDirectory(prefix="tinkerbus-bench-") as scratch:
        folder = model_folder(Path(scratch) / "bench-model")
        plain: list[list[Figures]] = []
        sdk: list[Figures] = []
        nats: list[Figures] = []
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}: bare Megatron loop")
            plain.append(bare(folder, threads, work))
            with starting(str(folder), Path(scratch) / f"data-{number}", say) as server:
                service = server.ready()
                say(f"round {number + 1} of {rounds}: through the SDK")
                sdk.append(through_sdk(service.http, service.api_key, service.base_model, work))
                say(f"round {number + 1} of {rounds}: through NATS")
                nats.append(
                    through_nats(
                        service.nats, service.tenant, service.nats_password, service.base_model, work
                    )
                )
        say("bare Megatron loop once more")
        plain.append(bare(folder, threads, work))
        for packing in zip(*plain, strict=True):
            yield combined(packing)
        yield combined(sdk)
        yield combined(nats)
