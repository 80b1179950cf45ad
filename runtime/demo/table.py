"""The demo's last word: what was trained, how far it got, how fast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from runtime.demo.records import ByHand, PolicyRun, Training


@dataclass(frozen=True, slots=True)
class Row:
    """One line; `before`, `after` and `gap` are ready to read."""

    what: str
    client: str
    steps: str
    before: str
    after: str
    throughput: str
    gap: str = "–"


def of_training(what: str, client: str, run: Training) -> Row:
    """Losses on held-out examples, in nats per trained token."""
    return Row(
        what,
        client,
        str(len(run.losses)),
        f"{run.before:.3f} nats",
        f"{run.after:.3f} nats",
        _throughput(run.tokens, run.seconds),
    )


def of_perplexity(what: str, client: str, run: Training) -> Row:
    """The same in perplexities, as one says of a language model."""
    before, after = math.exp(run.before), math.exp(run.after)
    return replace(
        of_training(what, client, run), before=f"perplexity {before:.1f}", after=f"perplexity {after:.1f}"
    )


def of_policy(run: PolicyRun) -> Row:
    return Row(
        "importance sampling",
        "SDK",
        str(len(run.steps)),
        f"reward {run.before:.2f}",
        f"reward {run.after:.2f}",
        _throughput(run.tokens, run.seconds),
        f"{min(s.gap for s in run.steps):.3f} to {max(s.gap for s in run.steps):.3f}",
    )


def of_op_by_hand(op: ByHand) -> Row:
    return Row("one forward", "NATS, JSON", "–", "–", f"{op.loss:.3f} nats", "–")


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title="What the demo trained", title_justify="left")
    shown.add_column("what", no_wrap=True)
    shown.add_column("through", no_wrap=True)
    for head in ("steps", "before", "after", "tokens/s", "gap |d|"):
        shown.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        shown.add_row(row.what, row.client, row.steps, row.before, row.after, row.throughput, row.gap)
    return shown


def _throughput(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:,.0f}"
