"""The demo's last word: what was trained, how far it got, how fast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.table import Table

from runtime.demo.records import ByHand, PolicyRun, Training

CAPTION = "nats and perplexity: of held-out text; gap: mean |lp − q|, by step"


@dataclass(frozen=True, slots=True)
class Row:
    """One line, ready to read."""

    task: str
    """And what `before` and `after` are measured in."""
    client: str
    steps: str
    before: str
    after: str
    throughput: str
    gap: str = "–"


def of_training(task: str, client: str, run: Training) -> Row:
    """Losses on held-out examples, in nats per trained token."""
    return Row(
        task=f"{task}, nats",
        client=client,
        steps=str(len(run.losses)),
        before=f"{run.before:.3f}",
        after=f"{run.after:.3f}",
        throughput=_throughput(run.tokens, run.seconds),
    )


def of_perplexity(task: str, client: str, run: Training) -> Row:
    """The same in perplexities, as one says of a language model."""
    return replace(
        of_training(task, client, run),
        task=f"{task}, perplexity",
        before=f"{math.exp(run.before):.1f}",
        after=f"{math.exp(run.after):.1f}",
    )


def of_policy(task: str, client: str, run: PolicyRun) -> Row:
    """Expected rewards, and the least and the largest mean gap of a step."""
    gaps = [step.gap for step in run.steps]
    return Row(
        task=f"{task}, reward",
        client=client,
        steps=str(len(run.steps)),
        before=f"{run.before:.3f}",
        after=f"{run.after:.3f}",
        throughput=_throughput(run.tokens, run.seconds),
        gap=f"{min(gaps):.2g}–{max(gaps):.2f}",
    )


def of_op_by_hand(task: str, client: str, op: ByHand) -> Row:
    return Row(f"{task}, nats", client, steps="–", before="–", after=f"{op.loss:.3f}", throughput="–")


def table(rows: Sequence[Row]) -> Table:
    """Fits into 80 columns."""
    shown = Table(box=box.SIMPLE_HEAD, caption=CAPTION)
    shown.add_column("task, unit", no_wrap=True)
    shown.add_column("through", no_wrap=True)
    for head in ("steps", "before", "after", "tok/s", "gap"):
        shown.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        shown.add_row(row.task, row.client, row.steps, row.before, row.after, row.throughput, row.gap)
    return shown


def _throughput(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:,.0f}"
