"""The demo as a picture: loss curves, and the gap between rollout and training logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runtime.demo.records import PolicyStep, Training

# Okabe and Ito's palette, https://jfly.uni-koeln.de/color/: told apart by colour-blind readers, and in grey by markers.
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
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
    figure.savefig(file, dpi=140)
    pyplot.close(figure)


def _losses(axis: Any, trainings: dict[str, Training]) -> None:
    for (name, run), colour, marker in zip(trainings.items(), COLOURS, MARKERS, strict=False):
        steps = range(1, len(run.losses) + 1)
        axis.plot(steps, run.losses, color=colour, marker=marker, markersize=4, label=name)
        axis.plot(
            [0.5, len(run.losses) + 0.5],
            [run.before, run.after],
            linestyle="none",
            marker="*",
            markersize=12,
            color=colour,
            markeredgecolor="black",
            label=f"{name}, held out, before and after",
        )
    axis.set(title="Supervised training", xlabel="optimizer step", ylabel="loss (nats per trained token)")
    axis.set_ylim(bottom=0)
    _readable(axis)


def _gap(axis: Any, steps: Sequence[PolicyStep]) -> None:
    numbers = range(1, len(steps) + 1)
    axis.plot(numbers, [s.gap for s in steps], color=BLUE, marker="o", label="mean |d|")
    axis.plot(numbers, [s.k1 for s in steps], color=ORANGE, marker="s", label="k1 = −d")
    axis.plot(numbers, [s.k3 for s in steps], color=GREEN, marker="^", label="k3 = eᵈ − 1 − d")
    fresh = [n for n, s in zip(numbers, steps, strict=True) if n == 1 or s.rollouts != steps[n - 2].rollouts]
    for n in fresh:
        axis.axvline(n, color="grey", linestyle=":", label="new rollouts" if n == fresh[0] else None)
    axis.set(
        title="Importance sampling: rollout against training policy",
        xlabel="optimizer step",
        ylabel="gap d = lp − q (nats, mean over sampled tokens)",
    )
    _readable(axis)


def _readable(axis: Any) -> None:
    axis.grid(visible=True, alpha=0.3)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(frameon=False)
