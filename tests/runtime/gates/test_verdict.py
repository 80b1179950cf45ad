"""Figures add up to the verdict of the worst one."""

from __future__ import annotations

import math

import pytest

from runtime.gates import suite
from runtime.gates.verdict import Findings, Level


def findings(*figures: tuple[float, float], loosen: float = 1.0) -> Findings:
    found = Findings(loosen=loosen)
    for number, (value, bar) in enumerate(figures):
        found.measured(f"figure {number}", value, bar)
    return found


@pytest.mark.parametrize(
    ("value", "level"),
    [
        (0.0, Level.BITWISE),
        (1e-6, Level.TINY),
        (1e-5, Level.BAR),
        (1e-4, Level.BAR),
        (1.0001e-4, Level.FAILS),
        (math.nan, Level.FAILS),
        (math.inf, Level.FAILS),
    ],
)
def test_one_figure(value: float, level: Level) -> None:
    assert findings((value, 1e-4)).verdict().level is level


def test_a_bar_below_1e_6_is_held_to() -> None:
    assert findings((5e-7, 1e-7)).verdict().level is Level.FAILS


def test_a_difference_of_0_with_other_bits_is_not_bitwise() -> None:
    found = Findings()
    found.measured("norm of 0 and -0", 0.0, 1e-4, same_bits=False)
    assert found.verdict().level is Level.TINY


def test_the_worst_figure_decides_and_the_one_nearest_its_bar_is_shown() -> None:
    verdict = findings((0.0, 1e-4), (5e-5, 1e-3), (4e-5, 1e-4), (1e-7, 1e-4)).verdict()
    assert (verdict.level, verdict.figure, verdict.bar) == (Level.BAR, 4e-5, 1e-4)


def test_a_nan_outweighs_every_other_failure() -> None:
    verdict = findings((5.0, 1e-4), (math.nan, 1e-4)).verdict()
    assert verdict.figure is not None
    assert math.isnan(verdict.figure)


def test_loosened_bars() -> None:
    assert findings((1e-3, 1e-4)).verdict().level is Level.FAILS
    verdict = findings((1e-3, 1e-4), loosen=10.0).verdict()
    assert (verdict.level, verdict.bar) == (Level.BAR, 1e-3)


def test_a_broken_condition_fails_whatever_the_figures_say() -> None:
    found = findings((0.0, 1e-4))
    found.must(True, "all is well")
    assert found.verdict().level is Level.BITWISE
    found.must(False, "clipped tokens move the model")
    verdict = found.verdict()
    assert verdict.level is Level.FAILS
    assert verdict.note.startswith("clipped tokens move the model")


def test_a_gate_that_measured_nothing_fails() -> None:
    assert Findings().verdict().level is Level.FAILS


def test_gates_are_chosen_by_name_in_the_order_of_the_suite() -> None:
    assert [gate.name for gate in suite.chosen(["retry-once", "twins"])] == ["twins", "retry-once"]
    assert suite.chosen([]) == suite.GATES
    with pytest.raises(ValueError, match="there is no gate 'twin'; there are twins, split-invariance"):
        suite.chosen(["twin"])


def test_names_are_unique() -> None:
    assert len({gate.name for gate in suite.GATES}) == len(suite.GATES)
