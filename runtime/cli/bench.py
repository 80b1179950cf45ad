"""`tinkerbus bench`: tokens per second and latency through the SDK, through NATS, and in a bare Megatron loop."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def bench(
    steps: Annotated[int, typer.Option(min=1, help="Pipelined steps of 32 x 128 tokens.")] = 20,
    calls: Annotated[int, typer.Option(min=1, help="Single calls of 32 tokens.")] = 200,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions; medians are shown.")] = 3,
) -> None:
    """Measure the service against a bare loop with the same model, data, threads and optimizer, in one run.

    Takes some minutes. Nothing else should run on the machine meanwhile.
    """
    from rich.console import Console
    from rich.table import Table

    from runtime.bench.run import run
    from runtime.bench.workload import Workload

    def say(word: str) -> None:
        print(f"tinkerbus: {word.removesuffix(' …')} …", file=sys.stderr, flush=True)

    table = Table("way", "tokens/s", "of the best bare loop", "p50 of a call, ms", "p99, ms")
    for row in run(Workload(steps=steps, calls=calls), rounds, say):
        f = row.figures
        table.add_row(
            f.way, f"{f.tokens_per_s:.0f}", f"{row.ratio:.3f}", f"{f.p50_ms:.1f}", f"{f.p99_ms:.1f}"
        )
    Console().print(table)
