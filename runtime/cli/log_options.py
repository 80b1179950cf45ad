"""What the commands of `tinkerbus log` have in common: where to look, and how errors and rows are printed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from runtime.config import Settings

Data = Annotated[
    str | None, typer.Option("--data", help="Data folder of the service, as `up` takes it.", metavar="DIR")
]
Nats = Annotated[
    str | None, typer.Option("--nats", help="The broker, where it is one of your own.", metavar="URL")
]
Config = Annotated[
    Path | None,
    typer.Option("--config", help="Settings as TOML; [nats] has user and password.", metavar="FILE"),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]


def model_id(text: str | None) -> str | None:
    if text == "":
        typer.echo("tinkerbus: MODEL is '': expected a model's id", err=True)
        raise typer.Exit(1)
    return text


Model = Annotated[str, typer.Argument(metavar="MODEL", help="A model's id.", callback=model_id)]


def settings_of(
    data: str | None, nats: str | None, config: Path | None, more: Mapping[str, Any] | None = None
) -> Settings:
    """The settings with these options; `more` has others, by dotted name."""
    from runtime.config import load
    from runtime.settings_reader import SettingsError

    given = {"data": data, "nats.url": nats, **(more or {})}
    try:
        return load(config, overrides={name: value for name, value in given.items() if value is not None})
    except SettingsError as error:
        typer.echo(f"tinkerbus: {error}", err=True)
        raise typer.Exit(2) from None


@contextlib.contextmanager
def errors_in_a_line() -> Iterator[None]:
    from bus.errors import BrokerError, CodecError
    from runtime.log_view import NotThere

    try:
        yield
    except (BrokerError, CodecError, NotThere) as error:
        typer.echo(f"tinkerbus: {error}", err=True)
        raise typer.Exit(1) from None


def print_json(rows: Iterable[object]) -> None:
    import msgspec

    for row in rows:
        print(msgspec.json.encode(row).decode(), flush=True)


def plain(value: object) -> str:
    """Text without characters that a terminal would act on: ids and errors are written by clients."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(value))
