"""The picture: it is a PNG, and it says what it shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib import pyplot

from runtime.demo import plot
from runtime.demo.records import PolicyStep, Training

TRAINING = Training(losses=(3.0, 2.0, 1.0), before=3.5, after=0.5, tokens=90, seconds=1.0)
STEPS = tuple(PolicyStep(i // 2, loss=0.0, gap=0.1 * i, k1=0.0, k2=0.0, k3=0.0) for i in range(4))


@pytest.mark.parametrize(("steps", "width"), [((), 6.5), (STEPS, 11)])
def test_a_png_is_written_with_a_panel_for_what_there_is(
    tmp_path: Path, steps: tuple[PolicyStep, ...], width: float
) -> None:
    file = tmp_path / "not-yet-there" / "plot.png"
    plot.draw(file, {"SDK": TRAINING}, steps)
    header = file.read_bytes()[:24]
    assert header.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(header[16:20], "big") == int(width * plot.DPI)


def test_steps_on_other_rollouts_are_not_joined() -> None:
    assert plot._parts(STEPS) == [(0, 2), (2, 4)]


def test_axes_carry_their_units() -> None:
    figure, (left, right) = pyplot.subplots(1, 2)
    plot._losses(left, {"SDK": TRAINING})
    plot._gap(right, STEPS)
    assert [axis.get_xlabel() for axis in (left, right)] == ["optimizer step"] * 2
    assert all("nats" in axis.get_ylabel() for axis in (left, right))
    pyplot.close(figure)
