"""The command `tinkerbus`. One file a command; heavy modules are imported when a command runs, not here."""

from __future__ import annotations

import typer

from runtime.cli.bench import bench
from runtime.cli.demo import demo
from runtime.cli.gates import gates
from runtime.cli.keys import keys
from runtime.cli.log import log
from runtime.cli.log_trim import trim as _trim  # noqa: F401 - adds itself to `log`
from runtime.cli.log_verify import verify as _verify  # noqa: F401 - adds itself to `log`
from runtime.cli.losses import losses
from runtime.cli.up import up

app = typer.Typer(
    name="tinkerbus",
    help="A self-hosted training service that speaks the Tinker API.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(up)
app.command()(demo)
app.command()(bench)
app.command()(gates)
app.command()(losses)
app.add_typer(log)
app.add_typer(keys)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"tinkerbus {version('tinkerbus')}")
        raise typer.Exit


@app.callback()
def _options(
    _version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version and stop."
    ),
) -> None:
    """Options that stand before a command. Having them keeps `up` a command of its own while it is the only one."""


def main() -> None:
    app()


if __name__ == "__main__":
    main()
