"""`tinkerbus log`: look into the log of a service, whether it runs or not."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from runtime.cli.log_options import (
    Config,
    Data,
    Json,
    Model,
    Nats,
    errors_in_a_line,
    plain,
    print_json,
    settings_of,
)

if TYPE_CHECKING:
    from runtime.log_view import EntryLine, ModelLine, Operation, ResultLine

log = typer.Typer(
    name="log",
    help="Look into the log: its models, one operation, one model as it goes on; verify and trim it.",
    no_args_is_help=True,
)


@log.command()
def models(data: Data = None, nats: Nats = None, config: Config = None, json: Json = False) -> None:
    """List the models: whose they are, where they stand on the log, how far their results go."""
    settings = settings_of(data, nats, config)
    with errors_in_a_line():
        from runtime.log_source import opened

        async def look() -> list[ModelLine]:
            async with opened(settings) as view:
                return await view.models()

        found = asyncio.run(look())
        if json:
            print_json(found)
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
    settings = settings_of(data, nats, config)
    number = None if seq == "end" else _number("SEQ", seq, 0, ', or "end" for unload_model')
    with errors_in_a_line():
        from runtime.log_source import opened

        async def look() -> Operation:
            async with opened(settings) as view:
                return await view.operation(model, number)

        found = asyncio.run(look())
        if json:
            print_json([found])
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
    settings = settings_of(data, nats, config)
    position = None if start is None else _number("--from", start, 1)
    with contextlib.suppress(KeyboardInterrupt), errors_in_a_line():
        from runtime.log_source import opened

        async def look() -> None:
            async with (
                opened(settings, waits=True) as view,
                contextlib.aclosing(view.follow(model, position)) as lines,
            ):
                async for line in lines:
                    if json:
                        print_json([line])
                    else:
                        _print_line(line)

        asyncio.run(look())


def _number(name: str, text: str, least: int, otherwise: str = "") -> int:
    if text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) < 2**63:
        return int(text)
    typer.echo(f"tinkerbus: {name} is {text!r}: expected a number of {least} or more{otherwise}", err=True)
    raise typer.Exit(1)


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
        table.add_row(*(Text("-" if cell is None else plain(cell)) for cell in cells))
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
        print(f"{plain(name):<{width}}  {plain(text)}")


def _print_line(line: EntryLine | ResultLine) -> None:
    from runtime.log_view import EntryLine

    if isinstance(line, EntryLine):
        head = f"{line.position:>8}  {line.request_id}  {line.verb}  {line.bytes} bytes"
    else:
        head = f"{'->':>8}  {line.request_id}  {line.type}  {line.bytes} bytes"
    print(plain(f"{head}  {line.says}".rstrip()), flush=True)
