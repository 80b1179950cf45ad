"""The catalogue keeps Prometheus's conventions, and its own."""

from __future__ import annotations

import re

import pytest

from observability.catalogue import LABEL_VALUES, METRICS, RECORDED, SAMPLES


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_a_metric_is_named_by_the_rules(metric) -> None:
    assert re.fullmatch(r"tinkerbus_[a-z0-9]+(_[a-z0-9]+)*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert (metric.unit == "seconds") == ("_seconds" in metric.name)
    assert metric.meaning.endswith(".")
    assert metric.unit in metric.help


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_its_labels_are_listed_and_none_is_unbounded(metric) -> None:
    assert set(metric.labels) <= set(LABEL_VALUES)
    assert not {"request_id", "seq_id", "tenant", "path", "process"} & set(metric.labels)
    assert bool(metric.labels) == (metric.name in RECORDED)


def test_every_label_is_used() -> None:
    assert {label for metric in METRICS.values() for label in metric.labels} == set(LABEL_VALUES)


def test_buckets_rise_to_an_hour() -> None:
    buckets = METRICS["tinkerbus_operation_duration_seconds"].buckets
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1] == 3600


def test_no_two_metrics_expose_the_same_sample() -> None:
    assert len(SAMPLES) == sum(len(metric.sample_names) for metric in METRICS.values())
