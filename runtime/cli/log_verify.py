"""`tinkerbus log verify`: run what stands on the log again, and compare."""

from __future__ import annotations

import sys
import time
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
    from runtime.verdicts import Checked, Tally

SHOWN = 20
"""Operations that differ, in the table; --json has all."""
SAY_EVERY_S = 5.0


@log.command()
def verify(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A model's id; all without.", callback=model_id)
    ] = None,
    base: Annotated[
        str | None, typer.Option("--model", help="As `up` was given it.", metavar="tiny|DIR")
    ] = None,
    dp: Annotated[int | None, typer.Option(help="As `up` was given it; so are the next three.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks.")] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline stages.")] = None,
    ep: Annotated[int | None, typer.Option(help="Ranks that share out a model's experts.")] = None,
    accept_new_bits: Annotated[
        bool,
        typer.Option("--accept-new-bits", help="Compare although bits may differ, as with another torch."),
    ] = False,
    data: Data = None,
    nats: Nats = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Run operations again on ranks of their own and compare each result; writes nothing. Exit code 1: some differ."""
    more = {"model": base, "layout.dp": dp, "layout.tp": tp, "layout.pp": pp, "layout.ep": ep}
    settings = settings_of(data, nats, config, more)
    screen = _Screen(json=json)
    with errors_in_a_line():
        from actors.group import GroupDied
        from runtime.fingerprint import FingerprintDiffers
        from runtime.service import Stopped
        from runtime.verify_run import verify as run

        try:
            run(settings, model, accept_new_bits=accept_new_bits, say=screen.say, tell=screen.tell)
        except (FingerprintDiffers, GroupDied) as error:
            typer.echo(f"tinkerbus: {error}", err=True)
            raise typer.Exit(1) from None
        except ValueError as error:
            typer.echo(f"tinkerbus: {error}", err=True)
            raise typer.Exit(2) from None
        except Stopped:
            raise typer.Exit(130) from None
    screen.finish()
    if screen.differing:
        raise typer.Exit(1)


class _Screen:
    """Progress on stderr, verdicts on stdout."""

    def __init__(self, *, json: bool) -> None:
        self._json = json
        self._tallies: list[Tally] = []
        self.differing: list[Checked] = []
        self._done = 0
        self._said = time.monotonic()

    def say(self, word: str) -> None:
        print(f"tinkerbus: {plain(word)} …", file=sys.stderr, flush=True)
        self._said = time.monotonic()

    def tell(self, found: Checked | Tally) -> None:
        from runtime.verdicts import Checked

        if self._json:
            print_json([found])
        if not isinstance(found, Checked):
            self._tallies.append(found)
            return
        self._done += 1
        if found.verdict == "differs":
            self.differing.append(found)
        if time.monotonic() - self._said >= SAY_EVERY_S:
            self.say(f"{self._done} operations compared, {len(self.differing)} differ")

    def finish(self) -> None:
        if not self._json:
            _print_tables(self._tallies, self.differing)


def _print_tables(tallies: list[Tally], differing: list[Checked]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from bus.events import request_id
    from runtime.verdicts import in_words

    console = Console()
    if not console.is_terminal:
        console.width = 200
    table = Table(box=box.SIMPLE)
    counts = ("same", "differs", "expired", "unanswered", "not_run", "not_reached")
    table.add_column("model", overflow="fold")
    table.add_column("from", overflow="fold")
    for heading in counts:
        table.add_column(heading.replace("_", " "), justify="right")
    for tally in tallies:
        cells = (plain(tally.model_id), tally.begins, *(str(getattr(tally, name)) for name in counts))
        table.add_row(*map(Text, cells))
    console.print(table)
    if not differing:
        return
    table = Table(box=box.SIMPLE)
    for heading in ("operation", "verb", "differs in"):
        table.add_column(heading, overflow="fold")
    for checked in differing[:SHOWN]:
        words = "; ".join(in_words(difference) for difference in checked.differences[:4])
        if len(checked.differences) > 4:
            words += f"; and {len(checked.differences) - 4} more"
        cells = (request_id(checked.model_id, checked.seq_id), checked.verb, words)
        table.add_row(*(Text(plain(cell)) for cell in cells))
    console.print(table)
    if len(differing) > SHOWN:
        console.print(f"and {len(differing) - SHOWN} more; --json has all of them")
