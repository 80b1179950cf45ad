"""`tinkerbus log`: look into the log of a service, whether it runs or not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from runtime.config import Settings
    from runtime.log_view import EntryLine, ModelLine, Operation, ResultLine

log = typer.Typer(
    name="log",
    help="Look into the log: its models, one operation, one model as it goes on.",
    no_args_is_help=True,
)

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


def _id(text: str) -> str:
    if not text:
        typer.echo("tinkerbus: MODEL is '': expected a model's id", err=True)
        raise typer.Exit(1)
    return text


Model = Annotated[str, typer.Argument(metavar="MODEL", help="A model's id.", callback=_id)]


@log.command()
def models(data: Data = None, nats: Nats = None, config: Config = None, json: Json = False) -> None:
    """List the models: whose they are, where they stand on the log, how far their results go."""
    settings = _settings(data, nats, config)
    with _errors_in_a_line():
        from runtime.log_source import opened

        async def look() -> list[ModelLine]:
            async with opened(settings) as view:
                return await view.models()

        found = asyncio.run(look())
        if json:
            _print_json(found)
        else:
            _print_models(found)


# Unknown options go through, so that "-1" is a SEQ, and refused by its value.
@log.command(context_settings={"ignore_unknown_options": True})
def show(
    model: Model,
    seq: Annotated[str, typer.Argument(metavar="SEQ", help='The operation\'s seq_id, or "end".')],
    data: Data = None,
    nats: Nats = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Show one operation, with shapes in place of tensors, its ledger row and its result."""
    settings = _settings(data, nats, config)
    number = None if seq == "end" else _number("SEQ", seq, 0, ', or "end" for unload_model')
    with _errors_in_a_line():
        from runtime.log_source import opened

        async def look() -> Operation:
            async with opened(settings) as view:
                return await view.operation(model, number)

        found = asyncio.run(look())
        if json:
            _print_json([found])
        else:
            _print_operation(found)


@log.command()
def follow(
    model: Model,
    start: Annotated[
        str | None,
        typer.Option(
            "--from", help="Begin at this position of the log; from now on by default.", metavar="POSITION"
        ),
    ] = None,
    data: Data = None,
    nats: Nats = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Print a line for each of a model's operations and results as they come, until Ctrl-C."""
    settings = _settings(data, nats, config)
    position = None if start is None else _number("--from", start, 1)
    with contextlib.suppress(KeyboardInterrupt), _errors_in_a_line():
        from runtime.log_source import opened

        async def look() -> None:
            async with (
                opened(settings, waits=True) as view,
                contextlib.aclosing(view.follow(model, position)) as lines,
            ):
                async for line in lines:
                    if json:
                        _print_json([line])
                    else:
                        _print_line(line)

        asyncio.run(look())


def _settings(data: str | None, nats: str | None, config: Path | None) -> Settings:
    from runtime.config import load
    from runtime.settings_reader import SettingsError

    given = {"data": data, "nats.url": nats}
    try:
        return load(config, overrides={name: value for name, value in given.items() if value is not None})
    except SettingsError as error:
        typer.echo(f"tinkerbus: {error}", err=True)
        raise typer.Exit(2) from None


def _number(name: str, text: str, least: int, otherwise: str = "") -> int:
    if text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) < 2**63:
        return int(text)
    typer.echo(f"tinkerbus: {name} is {text!r}: expected a number of {least} or more{otherwise}", err=True)
    raise typer.Exit(1)


@contextlib.contextmanager
def _errors_in_a_line() -> Iterator[None]:
    from bus.errors import BrokerError, CodecError
    from runtime.log_view import NotThere

    try:
        yield
    except (BrokerError, CodecError, NotThere) as error:
        typer.echo(f"tinkerbus: {error}", err=True)
        raise typer.Exit(1) from None


def _print_json(rows: Iterable[object]) -> None:
    import msgspec

    for row in rows:
        print(msgspec.json.encode(row).decode(), flush=True)


def _print_models(found: list[ModelLine]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE)
    for heading in ("model", "tenant", "status", "base model"):
        table.add_column(heading, overflow="fold")
    for heading in ("first", "last", "entries", "bytes", "last result", "trimmed below"):
        table.add_column(heading, justify="right")
    for line in found:
        cells = (
            line.model_id,
            line.tenant,
            line.status,
            line.base_model,
            line.first_position,
            line.last_position,
            line.entries,
            line.bytes,
            line.last_result,
            line.trimmed_below,
        )
        table.add_row(*(Text("-" if cell is None else _plain(cell)) for cell in cells))
    console = Console()
    if not console.is_terminal:
        console.width = 200
    console.print(table)


def _print_operation(found: Operation) -> None:
    import msgspec

    from runtime.log_summary import in_lines

    parts = msgspec.to_builtins(found)
    missing = {
        "position": "no longer on the log",
        "ledger": "none: not settled yet",
        "result": "none: not there yet, or expired",
    }
    rows: list[tuple[str, str]] = []
    for name, value in parts.items():
        if value is not None:
            rows += in_lines(value, name)
        elif name in missing:
            rows.append((name, missing[name]))
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{_plain(name):<{width}}  {_plain(text)}")


def _print_line(line: EntryLine | ResultLine) -> None:
    from runtime.log_view import EntryLine

    if isinstance(line, EntryLine):
        head = f"{line.position:>8}  {line.request_id}  {line.verb}  {line.bytes} bytes"
    else:
        head = f"{'->':>8}  {line.request_id}  {line.type}  {line.bytes} bytes"
    print(_plain(f"{head}  {line.says}".rstrip()), flush=True)


def _plain(value: object) -> str:
    """Text without characters that a terminal would act on: ids and errors are written by clients."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(value))
