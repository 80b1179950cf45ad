"""Snapshots of many processes as one set of series (pure: no clock, no socket).

What always holds: a counter never goes back while its model lives, whatever restarts; a gauge of a process that
is silent for `SILENT_AFTER_S` is gone; a message that comes late, twice or not at all changes neither.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from observability.catalogue import SAMPLES
from observability.snapshot import Sample, Snapshot

SILENT_AFTER_S = 10.0
FORGET_AFTER_S = 600.0
_FORGOTTEN_KEPT = 4096

Key: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]
"""The name of a sample, and its labels in alphabetical order."""


@dataclass(slots=True)
class _Incarnation:
    process: str
    number: int
    seen_at: float
    whole: int = 0
    """The newest snapshot of all its series that came."""
    removals: int = 0
    """The last removal applied."""
    counters: dict[Key, float] = field(default_factory=dict)
    gauges: dict[Key, float] = field(default_factory=dict)


class Totals:
    """The state of the exporter. Times are seconds of any one clock that does not go back."""

    def __init__(self) -> None:
        self._counters: dict[Key, float] = {}
        self._incarnations: dict[str, _Incarnation] = {}
        self._forgotten: OrderedDict[str, None] = OrderedDict()

    def add(self, snapshot: Snapshot, now: float) -> None:
        """Take in one snapshot. Samples that the catalogue does not list are left out."""
        known = self._incarnations.get(snapshot.incarnation)
        if known is not None and snapshot.number <= known.number:
            return
        if snapshot.since is not None and (known is None or known.whole != snapshot.since):
            if known is not None:
                known.number, known.seen_at = snapshot.number, now
            return  # changes of what was never heard; all of it will be said again soon
        counters, gauges = _split(snapshot)
        if known is None:
            known = _Incarnation(snapshot.process, snapshot.number, now)
            if self._forgotten.pop(snapshot.incarnation, 0) is None:
                known.counters = counters  # counted before it went silent; what it did since is lost
            self._incarnations[snapshot.incarnation] = known
        known.number, known.seen_at = snapshot.number, now

        for removal in snapshot.removals:
            if removal.number > known.removals:
                known.removals = removal.number
                self._remove(removal.labels)
                known.counters = _without(known.counters, removal.labels)
        for key, value in counters.items():
            before = known.counters.get(key, 0.0)
            grown = value - before if value >= before else value  # removed and begun anew in between
            self._counters[key] = self._counters.get(key, 0.0) + grown
        if snapshot.since is None:
            known.whole, known.counters, known.gauges = snapshot.number, counters, gauges
        else:
            known.counters |= counters
            known.gauges |= gauges

    def samples(self, now: float) -> Iterator[Sample]:
        """Everything there is, a gauge from the process that spoke last."""
        self._forget(now)
        gauges: dict[Key, float] = {}
        for incarnation in sorted(self._speaking(now), key=lambda known: known.seen_at):
            gauges |= incarnation.gauges
        for (name, labels), value in (self._counters | gauges).items():
            yield Sample(name, dict(labels), value)

    def processes(self, now: float) -> int:
        """How many processes, by name, spoke lately."""
        return len({known.process for known in self._speaking(now)})

    def _speaking(self, now: float) -> list[_Incarnation]:
        return [known for known in self._incarnations.values() if now - known.seen_at <= SILENT_AFTER_S]

    def _remove(self, labels: dict[str, str]) -> None:
        self._counters = _without(self._counters, labels)
        for known in self._incarnations.values():
            known.gauges = _without(known.gauges, labels)

    def _forget(self, now: float) -> None:
        """Keep the totals of the long silent, and of them no more than their names."""
        for name, known in list(self._incarnations.items()):
            if now - known.seen_at > FORGET_AFTER_S:
                del self._incarnations[name]
                self._forgotten[name] = None
        while len(self._forgotten) > _FORGOTTEN_KEPT:
            self._forgotten.popitem(last=False)


def _without(values: dict[Key, float], labels: dict[str, str]) -> dict[Key, float]:
    return {key: value for key, value in values.items() if not labels.items() <= dict(key[1]).items()}


def _split(snapshot: Snapshot) -> tuple[dict[Key, float], dict[Key, float]]:
    """(what adds up, what does not). A histogram's buckets, count and sum add up."""
    counters: dict[Key, float] = {}
    gauges: dict[Key, float] = {}
    for sample in snapshot.samples:
        metric = SAMPLES.get(sample.name)
        if metric is not None:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            (gauges if metric.kind == "gauge" else counters)[key] = sample.value
    return counters, gauges
