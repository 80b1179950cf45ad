"""`tinkerbus demo`: the main job end to end, through the official SDK and through NATS."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

EXTRA = ("tinker", "matplotlib", "gguf", "accelerate")


def demo(
    model: Annotated[
        Literal["tiny", "smollm2"],
        typer.Option(help="smollm2 trains the real SmolLM2-135M-Instruct, downloaded on first use."),
    ] = "tiny",
    data: Annotated[
        Path | None, typer.Option(help="Folder of the service; a temporary one by default.", metavar="DIR")
    ] = None,
    output: Annotated[Path, typer.Option(help="Where plot and metrics go.", metavar="DIR")] = Path(
        "demo-output"
    ),
) -> None:
    """Start a service, train on it through each of its doors, show how it went, stop everything."""
    from runtime.demo.failure import DemoFailed
    from runtime.demo.run import run

    try:
        run(model, data, output)
    except DemoFailed as error:
        typer.echo(f"tinkerbus: {error}", err=True)
        raise typer.Exit(1) from None
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        typer.echo(f"tinkerbus: the demo needs {error.name}: pip install 'tinkerbus[demo]'", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("tinkerbus: stopped", err=True)
        raise typer.Exit(130) from None
