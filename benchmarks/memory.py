"""How the memory of every process of a service grows with the requests it has served.

    python -m benchmarks.memory --requests 3000

starts `tinkerbus up` with the tiny model on a fresh folder, trains through the official SDK, one small
`forward_backward` and one `optim_step` after the other, each awaited, and reads every process's own memory (USS, what
would be free if it ended) every `--every` requests. The slope is a least-squares line through what came after the
first `--skip` requests. Then the service is left alone for `--idle` seconds, which shows what grows with time and not
with requests.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

MB = 1e6
LIMIT_MB = 1.0
"""Per 1,000 requests; more is a leak."""


@dataclass(slots=True)
class Process:
    """One process of the service."""

    name: str
    pid: int
    samples: list[tuple[float, float]] = field(default_factory=list)
    """(requests served, MB of its own)."""
    idle: list[tuple[float, float]] = field(default_factory=list)
    """(seconds without a request, MB of its own)."""

    def slope(self, skip: int) -> float | None:
        """MB per 1,000 requests after the first `skip`; None where too little was seen of it."""
        return slope([sample for sample in self.samples if sample[0] >= skip])


def slope(samples: Sequence[tuple[float, float]]) -> float | None:
    """Of the least-squares line through (requests, MB), in MB per 1,000; None below three samples."""
    if len(samples) < 3:
        return None
    x0 = sum(x for x, _ in samples) / len(samples)
    y0 = sum(y for _, y in samples) / len(samples)
    return 1000 * sum((x - x0) * (y - y0) for x, y in samples) / sum((x - x0) ** 2 for x, _ in samples)


class Watch:
    """The processes of a service, looked at now and then."""

    def __init__(self, root: psutil.Process) -> None:
        self._root = root
        self.processes: dict[int, Process] = {}

    def sample(self, requests: float, *, idle: bool = False) -> None:
        for found in [self._root, *self._root.children(recursive=True)]:
            try:
                own = found.memory_full_info().uss / MB
                known = self.processes.setdefault(found.pid, Process(name_of(found), found.pid))
                known.name = name_of(found)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            (known.idle if idle else known.samples).append((requests, own))

    def lasting(self) -> Iterable[Process]:
        """Those that were there to the end."""
        worked = [process for process in self.processes.values() if process.samples]
        last = max(process.samples[-1][0] for process in worked)
        return (process for process in worked if process.samples[-1][0] == last)


def name_of(process: psutil.Process) -> str:
    command = process.cmdline()
    title = " ".join(command)
    if title.startswith("ray::"):
        return command[0]
    if "runtime.cli.main" in title:
        return "tinkerbus up"
    script = re.search(r"([\w-]+/[\w-]+)\.py\b", title)
    return script[1] if script else Path(command[0]).name if command else process.name()


def train(url: str, api_key: str, requests: int, every: int, watch: Watch) -> float:
    """Requests in pairs; the seconds that they took."""
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    import tinker
    from tinker import types

    warnings.simplefilter("ignore", FutureWarning)
    service = tinker.ServiceClient(base_url=url, api_key=api_key)
    client = service.create_lora_training_client(base_model="tiny", rank=8, seed=1).result(timeout=120)
    tokens = list(range(9))
    inputs = {
        "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[8]),
        "weights": types.TensorData(data=[1.0] * 8, dtype="float32", shape=[8]),
    }
    data = [types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)]
    adam = types.AdamParams(learning_rate=1e-4)
    began = time.monotonic()
    for done in range(0, requests, 2):
        if done % every == 0:
            watch.sample(done)
        client.forward_backward(data, "cross_entropy").result(timeout=120)
        client.optim_step(adam).result(timeout=120)
    watch.sample(requests)
    return time.monotonic() - began


def rest(seconds: float, watch: Watch) -> None:
    began = time.monotonic()
    while (idle := time.monotonic() - began) < seconds:
        watch.sample(idle, idle=True)
        time.sleep(5)


def shown(number: float | None) -> str:
    return "" if number is None else f"{number:.2f}"


def main() -> int:
    from runtime.demo.server import starting

    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--requests", type=int, default=3000)
    options.add_argument("--skip", type=int, default=500)
    options.add_argument("--every", type=int, default=50)
    options.add_argument("--idle", type=float, default=120)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="tinkerbus-memory-") as scratch:
        before = {child.pid for child in psutil.Process().children()}
        with starting("tiny", Path(scratch), lambda word: print(word, file=sys.stderr)) as server:
            ready = server.ready()
            (root,) = [child for child in psutil.Process().children() if child.pid not in before]
            watch = Watch(root)
            seconds = train(ready.http, ready.api_key, chosen.requests, chosen.every, watch)
            rest(chosen.idle, watch)
    print(f"{chosen.requests} requests in {seconds:.0f} s; USS in MB\n")
    print("| process | after the first | at the end | MB per 1,000 requests | idle: MB per 100 s |")
    print("|---|---|---|---|---|")
    worst = 0.0
    for process in sorted(watch.lasting(), key=lambda one: -(one.slope(chosen.skip) or 0.0)):
        grown = process.slope(chosen.skip)
        if grown is None:
            continue
        worst = max(worst, grown)
        first = next(own for requests, own in process.samples if requests >= chosen.skip)
        idle = slope(process.idle)
        print(
            f"| {process.name} | {first:.1f} | {process.samples[-1][1]:.1f} | {shown(grown)} "
            f"| {shown(None if idle is None else idle / 10)} |"
        )
    return 0 if worst < LIMIT_MB else 1


if __name__ == "__main__":
    sys.exit(main())
