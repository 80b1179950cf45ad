"""`tinkerbus bench`: tokens per second and latency through the SDK, through NATS, and in a bare Megatron loop."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def bench(
    steps: Annotated[int, typer.Option(help="Pipelined steps of 32 x 128 tokens.")] = 20,
    calls: Annotated[int, typer.Option(help="Single calls of 32 tokens.")] = 200,
    rounds: Annotated[int, typer.Option(help="Repetitions; medians are shown.")] = 2,
) -> None:
    """Measure the service against a bare loop with the same model, data, threads and optimizer, in one run.

    Takes some minutes. Nothing else should run on the machine meanwhile.
    """
    from rich.console import Console
    from rich.table import Table

    from runtime.bench.run import run
    from runtime.bench.workload import Workload

    def say(word: str) -> None:
        print(f"tinkerbus: {word} …", file=sys.stderr, flush=True)

    figures = list(run(Workload(steps=steps, calls=calls), rounds, say))
    best = max((f for f in figures if f.way.startswith("bare")), key=lambda f: f.tokens_per_s)
    table = Table("way", "tokens/s", "of the best bare loop", "p50 of a call, ms", "p99, ms")
    for row in figures:
        ratio = row.tokens_per_s / best.tokens_per_s
        table.add_row(
            row.way, f"{row.tokens_per_s:.0f}", f"{ratio:.3f}", f"{row.p50_ms:.1f}", f"{row.p99_ms:.1f}"
        )
    Console().print(table)
