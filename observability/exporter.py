"""Gathers the snapshots of all processes and renders them for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector, CollectorRegistry

from bus import subjects
from bus.connection import Bus
from observability.catalogue import METRICS, SAMPLES
from observability.snapshot import Sample, UnreadableSnapshot, decode
from observability.totals import Totals

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""Of what `Exporter.render` returns."""


class Exporter:
    """Listens from `start` to `stop`. Any number may run; each knows what was said while it listened."""

    def __init__(self, bus: Bus, clock: Callable[[], float] = time.monotonic) -> None:
        self._bus = bus
        self._clock = clock
        self._totals = Totals()
        self._refused = 0
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        if self._subscription is None:
            self._subscription = await self._bus.nc.subscribe(
                f"{subjects.PREFIX}.metrics.>", cb=self._on_message
            )
            await self._bus.nc.flush()

    async def stop(self) -> None:
        if self._subscription is not None:
            await self._subscription.unsubscribe()
            self._subscription = None

    def render(self) -> bytes:
        """All series in Prometheus's text format; its content type is `CONTENT_TYPE`."""
        now = self._clock()
        samples = [
            *self._totals.samples(now),
            Sample("tinkerbus_reporting_processes", {}, self._totals.processes(now)),
            Sample("tinkerbus_refused_snapshots_total", {}, self._refused),
        ]
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Rendered(samples))
        return generate_latest(registry)

    async def _on_message(self, message: Msg) -> None:
        try:
            self._totals.add(decode(message.data), self._clock())
        except UnreadableSnapshot:
            self._refused += 1

    async def __aenter__(self) -> Exporter:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()


class _Rendered(Collector):
    """Samples grouped under the catalogue's help and type, in the order the format asks for."""

    def __init__(self, samples: list[Sample]) -> None:
        self._samples = sorted(samples, key=_order)

    def collect(self) -> Iterator[Family]:
        families: dict[str, Family] = {}
        for sample in self._samples:
            metric = SAMPLES[sample.name]
            family = families.get(metric.name)
            if family is None:
                name = metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name
                family = families[metric.name] = Family(name, metric.help, metric.kind)
            family.add_sample(sample.name, sample.labels, sample.value)
        yield from (families[name] for name in METRICS if name in families)


def _order(sample: Sample) -> tuple[list[tuple[str, str]], str, float]:
    """Series together, a histogram's buckets by their bound."""
    series = sorted((name, value) for name, value in sample.labels.items() if name != "le")
    return series, sample.name, float(sample.labels.get("le", "inf"))
