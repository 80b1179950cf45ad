"""The demo as a picture: loss curves, and the gap between rollout and training logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runtime.demo.records import PolicyStep, Training

# Okabe and Ito's palette, https://jfly.uni-koeln.de/color/: told apart by colour-blind readers, and in grey by markers.
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
DPI = 140
COLOURS, MARKERS = (BLUE, ORANGE), ("o", "s")


def draw(file: Path, trainings: dict[str, Training], policy: Sequence[PolicyStep] = ()) -> None:
    """Write a PNG. `trainings` are drawn together, by name; without `policy` there is no gap to draw."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, 2 if policy else 1, figsize=(11 if policy else 6.5, 4.4), squeeze=False, layout="constrained"
    )
    _losses(axes[0, 0], trainings)
    if policy:
        _gap(axes[0, 1], policy)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=DPI)
    pyplot.close(figure)


def _losses(axis: Any, trainings: dict[str, Training]) -> None:
    for (name, run), colour, marker in zip(trainings.items(), COLOURS, MARKERS, strict=False):
        steps = range(1, len(run.losses) + 1)
        axis.plot(
            steps, run.losses, color=colour, marker=marker, markersize=4, label=f"{name}, each step's batch"
        )
        held_out = {"linestyle": "none", "marker": "*", "markersize": 13, "color": colour}
        axis.plot(
            [0.5, len(run.losses) + 0.5],
            [run.before, run.after],
            **held_out,
            markeredgecolor="black",
            label=f"{name}, held out, before and after",
        )
    axis.set(title="Supervised training", xlabel="optimizer step", ylabel="loss (nats per trained token)")
    axis.set_ylim(bottom=0)
    _readable(axis)


def _gap(axis: Any, steps: Sequence[PolicyStep]) -> None:
    series = {
        "mean |d|": (BLUE, "o", [s.gap for s in steps]),
        "k1 = −d": (ORANGE, "s", [s.k1 for s in steps]),
        "k2 = d²/2": (PURPLE, "D", [s.k2 for s in steps]),
        "k3 = eᵈ − 1 − d": (GREEN, "^", [s.k3 for s in steps]),
    }
    for part, (first, end) in enumerate(_parts(steps)):
        numbers = range(first + 1, end + 1)
        for name, (colour, marker, values) in series.items():
            label = name if part == 0 else None
            axis.plot(numbers, values[first:end], color=colour, marker=marker, markersize=5, label=label)
        axis.axvline(first + 1, color="grey", linestyle=":", label="new rollouts" if part == 0 else None)
    axis.set(
        title="Importance sampling: the gap to the policy that sampled",
        xlabel="optimizer step",
        ylabel="gap d = lp − q (nats, mean over sampled tokens)",
    )
    axis.set_ylim(top=1.3 * axis.get_ylim()[1])
    _readable(axis, columns=3)


def _parts(steps: Sequence[PolicyStep]) -> list[tuple[int, int]]:
    """Where the steps on each batch of rollouts begin and end."""
    fresh = [i for i, step in enumerate(steps) if i == 0 or step.rollouts != steps[i - 1].rollouts]
    return list(zip(fresh, [*fresh[1:], len(steps)], strict=True))


def _readable(axis: Any, columns: int = 1) -> None:
    axis.grid(visible=True, alpha=0.3)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(frameon=False, ncols=columns, loc="upper right")
