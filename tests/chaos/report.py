"""The table of a chaos run, for the screen and for the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from tests.chaos.run import Hit, Outcome
from tests.chaos.schedule import LIMITS_S, Kind

BEGIN, END = "<!-- table of chaos: begin -->", "<!-- table of chaos: end -->"
EVENTS = ("seed", "kind", "signal", "moment, s", "recovery, s", "outcome")
KINDS = ("kind", "events", "longest recovery, s", "limit, s", "within it")


@dataclass(frozen=True, slots=True)
class Seed:
    """One seed, judged."""

    number: int
    outcome: Outcome
    faults: tuple[str, ...]
    """Of the run, and of the comparison."""

    @property
    def slow(self) -> list[Hit]:
        return [hit for hit in self.outcome.hits if not within(hit)]


def within(hit: Hit) -> bool:
    limit = LIMITS_S.get(hit.event.kind)
    return hit.recovered_s is not None and (limit is None or hit.recovered_s <= limit)


def passed(seeds: Sequence[Seed]) -> bool:
    return not any(seed.faults or seed.slow for seed in seeds)


def event_rows(seeds: Sequence[Seed]) -> list[tuple[str, ...]]:
    return [
        (
            str(seed.number),
            hit.event.kind.value,
            hit.event.what,
            f"{hit.at_s:.1f}",
            "never" if hit.recovered_s is None else f"{hit.recovered_s:.1f}",
            "**fault**" if seed.faults else ("same bits" if within(hit) else "same bits, **slow**"),
        )
        for seed in seeds
        for hit in seed.outcome.hits
    ]


def kind_rows(seeds: Sequence[Seed]) -> list[tuple[str, ...]]:
    rows = []
    for kind in Kind:
        hits = [hit for seed in seeds for hit in seed.outcome.hits if hit.event.kind is kind]
        if not hits:
            continue
        never = any(hit.recovered_s is None for hit in hits)
        longest = max((hit.recovered_s for hit in hits if hit.recovered_s is not None), default=0.0)
        limit = LIMITS_S.get(kind)
        count = sum(map(within, hits))
        rows.append(
            (
                kind.value,
                str(len(hits)),
                "never" if never else f"{longest:.1f}",
                "none" if limit is None else f"{limit:g}",
                f"{count} of {len(hits)}",
            )
        )
    return rows


def screen(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    return table


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def write(page: Path, seeds: Sequence[Seed]) -> None:
    """Replace the marked section of `page`. Raises ValueError where it has none."""
    text = page.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page} has no section between {BEGIN!r} and {END!r}")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    good = sum(1 for seed in seeds if not seed.faults)
    lines = [
        f"{good} of {len(seeds)} seeds ended with the bits of the undisturbed run, each operation with one result.",
        "",
        *markdown(KINDS, kind_rows(seeds)),
        "",
        "<details><summary>Every event</summary>",
        "",
        *markdown(EVENTS, event_rows(seeds)),
        "",
        "</details>",
    ]
    page.write_text("\n".join([before + BEGIN, "", *lines, "", END + after]))
