"""`tinkerbus gates`: what a Tinker-compatible server has to hold, measured through its public wire."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def gates(
    url: Annotated[str, typer.Option(help="The server's address, as the SDK takes it.")],
    api_key: Annotated[
        str, typer.Option(envvar="TINKER_API_KEY", help="As the SDK takes it.")
    ] = "tml-tinkerbus",
    base_model: Annotated[
        str | None, typer.Option(help="What to train; the server's first model unless given.")
    ] = None,
    dumps: Annotated[
        Path | None, typer.Option(help="Folder of debug.dump_gradients: gradients are compared too.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="A gate's name; may be given again.")] = None,
    loosen: Annotated[
        float, typer.Option(min=1.0, help="Factor on every bar, for coarser arithmetic.")
    ] = 1.0,
) -> None:
    """Ask a server for every property and print a verdict per line. Exit code 0 only when nothing fails."""
    from rich.console import Console
    from rich.table import Table

    try:
        from runtime.gates import suite
        from runtime.gates.wire import Unreachable, connect
    except ModuleNotFoundError as error:
        if error.name != "tinker":
            raise
        print("tinkerbus: the gates need tinker: pip install 'tinkerbus[demo]'", file=sys.stderr)
        raise typer.Exit(1) from None

    try:
        wanted = suite.chosen(only or ())
        wire = connect(url, api_key, base_model)
    except (ValueError, Unreachable) as error:
        print(f"tinkerbus: {error}", file=sys.stderr)
        raise typer.Exit(2) from None

    def say(name: str) -> None:
        print(f"tinkerbus: {name} …", file=sys.stderr, flush=True)

    lines = list(suite.run(wire, wanted, dump_folder=dumps, loosen=loosen, say=say))
    table = Table("gate", "verdict", "figure", "bar", "s", "measured")
    for line in lines:
        v = line.verdict
        figure, bar = ("" if value is None else f"{value:.1e}" for value in (v.figure, v.bar))
        table.add_row(line.name, str(v.level), figure, bar, f"{line.seconds:.1f}", v.note)
    console = Console()
    if not console.is_terminal:
        console.width = 200
    console.print(table)
    if not suite.passed(lines):
        raise typer.Exit(1)
