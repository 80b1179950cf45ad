"""The table at the end."""

from __future__ import annotations

import math

from rich.console import Console

from runtime.demo import table
from runtime.demo.records import ByHand, PolicyRun, PolicyStep, Training

TRAINING = Training(losses=(3.0, 2.0, 1.0), before=math.log(64), after=math.log(2), tokens=9000, seconds=4.5)
STEPS = tuple(PolicyStep(0, loss=0.0, gap=gap, k1=0.0, k2=0.0, k3=0.0) for gap in (0.0, 0.25))


def test_a_training_shows_steps_losses_and_tokens_a_second() -> None:
    row = table.of_training("ROT13", "SDK", TRAINING)
    assert (row.steps, row.before, row.after, row.throughput) == ("3", "4.159", "0.693", "2,000")


def test_perplexity_is_the_exponential_of_the_loss() -> None:
    row = table.of_perplexity("sentences", "SDK", TRAINING)
    assert (row.task, row.before, row.after) == ("sentences, perplexity", "64.0", "2.0")


def test_a_policy_shows_its_reward_and_the_range_of_its_gap() -> None:
    row = table.of_policy("capitals", "SDK", PolicyRun(STEPS, 0.125, 0.5, 100, 1.0))
    assert (row.before, row.after, row.gap) == ("0.125", "0.500", "0–0.25")


def test_the_table_fits_into_80_columns_uncut() -> None:
    rows = [
        table.of_training("ROT13", "NATS msgpack", TRAINING),
        table.of_policy("capitals", "SDK", PolicyRun(STEPS, 0.1, 0.5, 100, 1.0)),
        table.of_op_by_hand("one forward", "NATS JSON", ByHand("subject", "application/json", 0.1)),
    ]
    console = Console(width=80, no_color=True)
    with console.capture() as captured:
        console.print(table.table(rows))
    assert "…" not in captured.get()
