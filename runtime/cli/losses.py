"""`tinkerbus losses`: which losses a request may name here, those of plug-ins too."""

from __future__ import annotations

import dataclasses
import inspect

import typer


def losses() -> None:
    """List every loss with its inputs and configuration. Exit code 1 where an installed plug-in is left out."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    import loss_hub

    table = Table("loss", "inputs", "configuration (default)", "what it is", "from")
    for name in loss_hub.names():
        loss = loss_hub.get(name)
        config = ", ".join(f"{key} ({value})" for key, value in dataclasses.asdict(loss.config()).items())
        says = (inspect.getdoc(loss.function) or "").partition("\n")[0]
        inputs = ", ".join(spec.name for spec in loss.inputs)
        table.add_row(*map(Text, (name, inputs, config, says, loss.function.__module__)))
    console = Console()
    if not console.is_terminal:
        console.width = 220
    console.print(table)
    for sentence in loss_hub.left_out():
        typer.echo(f"tinkerbus: {sentence}", err=True)
    if loss_hub.left_out():
        raise typer.Exit(1)
