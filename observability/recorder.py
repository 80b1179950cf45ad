"""Where a process counts what it does. Only what the catalogue lists can be recorded.

Threads may share a recorder. Counters and histograms of a labelled thing start at 0 when it starts (`begin`),
so that its first event is already an increase.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from observability.catalogue import LABEL_VALUES, RECORDED, Metric, NotInCatalogue, check_label
from observability.snapshot import Removal, Sample, Snapshot

_REMOVALS_KEPT_S = 60.0


class Recorder:
    """The series of one process."""

    def __init__(self, process: str, **defaults: str) -> None:
        """`process` is the role's name, the same after a restart. `defaults` fill in labels that a call leaves
        out, where the metric has them: `Recorder("dispatcher", group="tiny")`."""
        _check_labels(defaults)
        self.process = process
        self.incarnation = uuid.uuid4().hex
        self._defaults = defaults
        self._families = {metric.name: _family(metric) for metric in RECORDED.values()}
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._snapshots = itertools.count(1)
        self._removals: deque[tuple[float, Removal]] = deque()
        self._removal_numbers = itertools.count(1)
        self._touched: set[str] = set()
        """Metrics that may have changed since they were last collected."""
        self._collected: dict[str, tuple[Sample, ...]] = {}
        self._whole = 0
        """Number of the newest snapshot of all series."""
        self._before: dict[str, tuple[Sample, ...]] = {}
        """What that one said of metrics that may have changed since."""
        self.begin()

    def inc(self, name: str, n: float = 1, **labels: str) -> None:
        """Add `n`, finite and not negative, to a counter."""
        _check_amount(name, n)
        family, values = self._series(name, labels)
        if not isinstance(family, Counter):
            raise NotInCatalogue(f"{name} is not a counter")
        family.labels(*values).inc(n)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge; NaN and ±inf are values like any other."""
        family, values = self._series(name, labels)
        if not isinstance(family, Gauge):
            raise NotInCatalogue(f"{name} is not a gauge")
        family.labels(*values).set(value)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Put a value, finite and not negative, into a histogram."""
        _check_amount(name, value)
        family, values = self._series(name, labels)
        if not isinstance(family, Histogram):
            raise NotInCatalogue(f"{name} is not a histogram")
        family.labels(*values).observe(value)

    def begin(self, **labels: str) -> None:
        """Start at 0 every counter and histogram with these labels, the others given by the defaults.

        A label with listed values takes all of them. The process's own series begin with the recorder, a
        model's when it is created: `begin(model=model_id)`.
        """
        _check_labels(labels)
        given = self._defaults | labels
        for metric in RECORDED.values():
            if metric.kind == "gauge" or not labels.keys() <= set(metric.labels):
                continue
            choices = [
                (given[name],) if name in given else LABEL_VALUES[name] or () for name in metric.labels
            ]
            for values in itertools.product(*choices):
                self._families[metric.name].labels(*values)
            self._touched.add(metric.name)

    def remove(self, **labels: str) -> None:
        """Forget every series with these labels, here and in the exporter: `remove(model=model_id)`."""
        if not labels:
            raise NotInCatalogue("remove needs a label: it never forgets everything")
        _check_labels(labels)
        for metric in RECORDED.values():
            for values in self._label_values(metric):
                if labels.items() <= dict(zip(metric.labels, values, strict=True)).items():
                    self._families[metric.name].remove(*values)
                    self._touched.add(metric.name)
        with self._lock:
            self._removals.append((time.monotonic(), Removal(next(self._removal_numbers), labels)))

    def before_snapshot(self, callback: Callable[[], None]) -> None:
        """Have `callback` called before each snapshot, to set gauges that are read off rather than counted."""
        self._callbacks.append(callback)

    def snapshot(self) -> Snapshot:
        """The state of all series."""
        self._read_gauges()
        with self._lock:
            self._collect()
            snapshot = self._told(itertools.chain.from_iterable(self._collected.values()))
            self._whole, self._before = snapshot.number, {}
            return snapshot

    def changes(self) -> Snapshot:
        """What has changed since the newest `snapshot`, of which there must be one."""
        self._read_gauges()
        with self._lock:
            self._collect()
            return self._told(self._changed(), self._whole)

    def _read_gauges(self) -> None:
        for callback in self._callbacks:
            callback()

    def _collect(self) -> None:
        touched, self._touched = self._touched, set()
        for name in touched:
            self._before.setdefault(name, self._collected.get(name, ()))
            self._collected[name] = tuple(self._samples(name))

    def _changed(self) -> Iterator[Sample]:
        for name, before in self._before.items():
            told = {_identity(sample): sample.value for sample in before}
            for sample in self._collected[name]:
                if told.get(_identity(sample)) != sample.value:
                    yield sample

    def _told(self, samples: Iterable[Sample], since: int | None = None) -> Snapshot:
        oldest = time.monotonic() - _REMOVALS_KEPT_S
        while self._removals and self._removals[0][0] < oldest:
            self._removals.popleft()
        return Snapshot(
            process=self.process,
            incarnation=self.incarnation,
            number=next(self._snapshots),
            samples=tuple(samples),
            since=since,
            removals=tuple(removal for _, removal in self._removals),
        )

    def _series(self, name: str, labels: dict[str, str]) -> tuple[MetricWrapperBase, tuple[str, ...]]:
        metric = RECORDED.get(name)
        if metric is None:
            raise NotInCatalogue(f"no metric named {name!r} is recorded; see observability/catalogue.py")
        if not labels.keys() <= set(metric.labels):
            odd = ", ".join(sorted(labels.keys() - set(metric.labels)))
            raise NotInCatalogue(f"{name} has no label {odd}; its labels are {', '.join(metric.labels)}")
        given = self._defaults | labels
        missing = [label for label in metric.labels if label not in given]
        if missing:
            raise NotInCatalogue(f"{name} needs the label {', '.join(missing)}")
        _check_labels(labels)
        self._touched.add(name)
        return self._families[name], tuple(given[label] for label in metric.labels)

    def _label_values(self, metric: Metric) -> Iterable[tuple[str, ...]]:
        """Those of every series there is, each once."""
        return dict.fromkeys(
            tuple(sample.labels[label] for label in metric.labels)
            for exposed in self._families[metric.name].collect()
            for sample in exposed.samples
        )

    def _samples(self, name: str) -> Iterator[Sample]:
        exposed_names = RECORDED[name].sample_names  # leaves out `_created`, which nothing here reads
        for exposed in self._families[name].collect():
            for sample in exposed.samples:
                if sample.name in exposed_names:
                    yield Sample(sample.name, dict(sample.labels), float(sample.value))


def _identity(sample: Sample) -> tuple[str, ...]:
    """Of the samples of one metric, whose labels all have one order."""
    return (sample.name, *sample.labels.values())


def _family(metric: Metric) -> MetricWrapperBase:
    registry = CollectorRegistry()
    match metric.kind:
        case "counter":
            return Counter(metric.name, metric.help, metric.labels, registry=registry)
        case "gauge":
            return Gauge(metric.name, metric.help, metric.labels, registry=registry)
        case "histogram":
            return Histogram(
                metric.name, metric.help, metric.labels, registry=registry, buckets=metric.buckets
            )


def _check_labels(labels: dict[str, str]) -> None:
    for name, value in labels.items():
        check_label(name, value)


def _check_amount(name: str, amount: float) -> None:
    if not 0 <= amount < math.inf:
        raise ValueError(f"{name} takes {amount}; must be a finite number, not negative")
