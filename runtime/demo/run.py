"""The demo from start to end: start the service, train through each of its doors, show it, stop everything."""

from __future__ import annotations

import contextlib
import signal
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from runtime.demo import plot, smollm2, table
from runtime.demo.records import PolicyStep, Training
from runtime.demo.screen import Screen
from runtime.demo.server import starting

if TYPE_CHECKING:
    from runtime.demo.tour import Tour

Model = Literal["tiny", "smollm2"]

PLOT, METRICS = "training.png", "metrics.txt"
SNAPSHOT_S = 1.5
"""After this long `/metrics` has what every process last counted."""


def run(model: Model, data: Path | None, output: Path, screen: Screen | None = None) -> None:
    """Show it all, and write the plot and a snapshot of the metrics to `output`.

    `data` is the service's folder; None for a temporary one. Raises DemoFailed, and KeyboardInterrupt on Ctrl-C
    and SIGTERM; nothing that was started is left either way.
    """
    screen = screen or Screen()
    began = time.monotonic()
    output.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.ExitStack() as stack:
        folder = data or Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="tinkerbus-demo-", ignore_cleanup_errors=True)
            )
        )
        if model == "smollm2":
            _smollm2(folder, output, screen)
        else:
            _tiny(folder, output, screen)
    seconds = {**screen.seconds, "in all": time.monotonic() - began}
    screen.line("seconds: " + ", ".join(f"{name} {took:.0f}" for name, took in seconds.items()))


def _tiny(folder: Path, output: Path, screen: Screen) -> None:
    with _service("tiny", folder, output, screen) as tour:
        supervised = tour.supervised()
        policy = tour.policy()
        events, by_hand = tour.events()
    rows = [
        table.of_training("ROT13", "SDK", supervised),
        table.of_policy("capitals", "SDK", policy),
        table.of_training("ROT13", "NATS msgpack", events),
        table.of_op_by_hand("one forward", "NATS JSON", by_hand),
    ]
    _show(rows, {"SDK": supervised, "NATS": events}, policy.steps, output, screen)


def _smollm2(folder: Path, output: Path, screen: Screen) -> None:
    with screen.phase("model", "SmolLM2-135M-Instruct as a Hugging Face folder"):
        model_folder = smollm2.ensure(screen.working)
    with _service(str(model_folder), folder, output, screen) as tour:
        supervised = tour.sentences(model_folder)
    _show([table.of_perplexity("sentences", "SDK", supervised)], {"SDK": supervised}, (), output, screen)


@contextlib.contextmanager
def _service(model: str, folder: Path, output: Path, screen: Screen) -> Iterator[Tour]:
    """A service to train on; it is stopped at the end, and what its metrics were is kept."""
    with contextlib.ExitStack() as stack:
        with screen.phase("start", "Starting `tinkerbus up` on free ports"):
            server = stack.enter_context(starting(model, folder, screen.working))
            from runtime.demo.tour import Tour  # some seconds of imports, while the service starts

            endpoints = server.ready()
            screen.line(f"serving {endpoints.http}, {endpoints.nats} and {endpoints.metrics}")
            tour = Tour(endpoints, screen)
        yield tour
        with screen.phase("stop", "Stopping everything"):
            _keep_metrics(endpoints.metrics, output / METRICS)  # the SDK's models and their series still live
            tour.leave()
            stack.close()


def _keep_metrics(url: str, file: Path) -> None:
    time.sleep(SNAPSHOT_S)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(url, timeout=10) as answer:
        file.write_bytes(answer.read())


def _show(
    rows: Sequence[table.Row],
    curves: dict[str, Training],
    policy: Sequence[PolicyStep],
    output: Path,
    screen: Screen,
) -> None:
    plot.draw(output / PLOT, curves, policy)
    screen.show(table.table(rows))
    screen.line(f"plot:      {output / PLOT}")
    screen.line(f"metrics:   {output / METRICS}, as they stood at /metrics")
    screen.line(f"dashboard: {files('observability') / 'dashboards' / 'training.json'}, for Grafana")
