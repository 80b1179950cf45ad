"""`python -m tests.chaos --seeds 20`: kill and stop every kind of process, and compare bits with an undisturbed run.

Ends with 0 only when every seed ended with the same bits and every recovery was within its limit.
"""

from __future__ import annotations

import logging
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tests.chaos import report
from tests.chaos.seeds import STEPS, Chaos
from tests.chaos.undisturbed import Disturbed


def main(
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds.")] = 3,
    first: Annotated[int, typer.Option(help="The first of them.")] = 1,
    steps: Annotated[int, typer.Option(min=20, help="Optimizer steps of each tenant.")] = STEPS,
    dp: Annotated[int, typer.Option(min=1, help="Ranks, with the distributed optimizer.")] = 2,
    work: Annotated[
        Path | None, typer.Option(help="Keeps the undisturbed run, and what a failed seed left.")
    ] = None,
    write: Annotated[Path | None, typer.Option(help="Page whose marked section gets the tables.")] = None,
) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is stopped then, too
    logging.getLogger("tinker").setLevel(logging.CRITICAL)  # it tells of every retry
    console = Console(width=None if Console().is_terminal else 140)
    folder = work or Path(tempfile.mkdtemp(prefix="tinkerbus-chaos-"))
    judged: list[report.Seed] = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("undisturbed run", total=seeds + 1)

        def say(what: str) -> None:
            progress.update(bar, description=what)
            if not console.is_terminal:
                progress.console.print(what)

        try:
            chaos = Chaos(folder, steps, dp=dp, say=say)
        except Disturbed as error:
            console.print(f"the undisturbed run went wrong: {error}", markup=False)
            raise typer.Exit(2) from None
        progress.advance(bar)
        for number in range(first, first + seeds):
            seed = chaos.judge(number)
            judged.append(seed)
            progress.advance(bar)
            for fault in seed.faults:
                progress.console.print(f"seed {number}: {fault}", markup=False)
    console.print(report.screen(report.EVENTS, report.event_rows(judged)))
    console.print(report.screen(report.KINDS, report.kind_rows(judged)))
    good = sum(1 for seed in judged if not seed.faults)
    console.print(f"{good} of {seeds} seeds ended with the bits of the undisturbed run")
    if write is not None:
        report.write(write, judged)
    if work is None and report.passed(judged):
        shutil.rmtree(folder, ignore_errors=True)
    else:
        console.print(f"kept: {folder}")
    if not report.passed(judged):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
