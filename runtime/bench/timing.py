"""Figures of one way of training."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec


class Figures(msgspec.Struct, frozen=True):
    """What was measured of one way."""

    way: str
    tokens_per_s: float
    p50_ms: float
    p99_ms: float


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, interpolated as numpy does.

    >>> percentile([1, 2, 3, 4], 0.5)
    2.5
    """
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def combined(runs: Sequence[Figures]) -> Figures:
    """Of several runs of one way: the median of each figure."""
    return Figures(
        runs[0].way,
        statistics.median(run.tokens_per_s for run in runs),
        statistics.median(run.p50_ms for run in runs),
        statistics.median(run.p99_ms for run in runs),
    )
