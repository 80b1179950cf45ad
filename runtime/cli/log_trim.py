"""`tinkerbus log trim`: drop what nothing needs any more."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from runtime.cli.log import log
from runtime.cli.log_options import (
    Config,
    Data,
    Json,
    Nats,
    errors_in_a_line,
    model_id,
    plain,
    print_json,
    settings_of,
)

if TYPE_CHECKING:
    from runtime.trim import Cut


@log.command()
def trim(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A model's id; all without.", callback=model_id)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go, and drop nothing.")] = False,
    data: Data = None,
    nats: Nats = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Drop operations and ledger rows of ended models, and what stands before live models' snapshots."""
    settings = settings_of(data, nats, config)
    with errors_in_a_line():
        from runtime.log_source import connected
        from runtime.log_view import LogView, NotThere
        from runtime.service import GROUP
        from runtime.snapshots import Snapshots
        from runtime.trim import apply, cuts

        kept = Snapshots.to_read(Path(settings.data).resolve() / "snapshots" / GROUP)

        async def look() -> list[Cut]:
            async with connected(settings) as bus:
                await LogView.open(bus, GROUP)
                found = [one for one in await cuts(bus, GROUP, kept) if model in (None, one.model_id)]
                if model is not None:
                    if not found:
                        raise NotThere(f"model {model!r} has no operations on the log")
                    if not found[0].entries:
                        raise NotThere(f"nothing of model {model!r} is dropped: {found[0].because}")
                for one in found if not dry_run else ():
                    await apply(bus, GROUP, one)
                return found

        found = asyncio.run(look())
    if json:
        print_json(found)
    else:
        _print(found, dry_run=dry_run)


def _print(found: list[Cut], *, dry_run: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE)
    for heading in ("model", "status"):
        table.add_column(heading, overflow="fold")
    for heading in ("operations", "bytes", "ledger rows", "stay"):
        table.add_column(heading, justify="right")
    table.add_column("because", overflow="fold")
    for one in found:
        cells = (
            one.model_id,
            one.status or "-",
            one.entries,
            one.bytes,
            one.ledger_rows,
            one.stay,
            one.because,
        )
        table.add_row(*(Text(plain(cell)) for cell in cells))
    console = Console()
    if not console.is_terminal:
        console.width = 200
    console.print(table)
    entries, size = sum(one.entries for one in found), sum(one.bytes for one in found)
    rows = sum(one.ledger_rows for one in found)
    verb = "would go" if dry_run else "went"
    console.print(f"{entries} operations ({size} bytes) and {rows} ledger rows {verb}")
