"""What rounds add up to."""

from __future__ import annotations

from runtime.bench.run import Round, table
from runtime.bench.timing import Figures


def figures(way: str, speed: float) -> Figures:
    return Figures(way, speed, 1.0, 2.0)


def a_round(before: tuple[float, float], sdk: float, after: tuple[float, float]) -> Round:
    names = ("bare, 4", "bare, 8")
    return Round(
        [figures(*pair) for pair in zip(names, before, strict=True)],
        [figures("SDK", sdk)],
        [figures(*pair) for pair in zip(names, after, strict=True)],
    )


def test_a_ratio_is_to_the_bare_loop_of_its_own_round() -> None:
    """The machine runs at full speed, at half, and at full speed again: the ratio stays 0.8."""
    rows = table(
        [
            a_round((900, 1000), 800, (900, 1000)),
            a_round((450, 500), 400, (450, 500)),
            a_round((900, 1000), 800, (900, 1000)),
        ]
    )
    assert [(row.figures.way, row.figures.tokens_per_s, row.ratio) for row in rows] == [
        ("bare, 4", 900, 0.9),
        ("bare, 8", 1000, 1.0),
        ("SDK", 800, 0.8),
    ]


def test_a_machine_that_slows_down_within_a_round() -> None:
    (four, eight, sdk) = table([a_round((900, 1000), 720, (700, 800))])
    assert eight.figures.tokens_per_s == 900
    assert sdk.ratio == 0.8
    assert four.ratio == 800 / 900
