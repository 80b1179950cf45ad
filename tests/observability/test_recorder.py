"""Recording what the catalogue lists, and nothing else."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from observability import NotInCatalogue, Recorder
from observability.snapshot import FORMAT, Snapshot, UnreadableSnapshot, decode, encode


def read(recorder: Recorder, name: str, **labels: str) -> float | None:
    return next((s.value for s in recorder.snapshot().samples if s.name == name and s.labels == labels), None)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder("dispatcher", group="tiny")


def test_a_default_label_fills_in_where_the_metric_has_it(recorder) -> None:
    recorder.inc("tinkerbus_steps_total", model="m")
    recorder.inc("tinkerbus_steps_total", 2, model="m")
    recorder.inc("tinkerbus_ingress_requests_total", route="/metrics", status="2xx")
    assert read(recorder, "tinkerbus_steps_total", group="tiny", model="m") == 3
    assert read(recorder, "tinkerbus_ingress_requests_total", route="/metrics", status="2xx") == 1


@pytest.mark.parametrize(
    ("name", "labels", "says"),
    [
        ("tinkerbus_stepz_total", {"model": "m"}, "tinkerbus_stepz_total"),
        ("tinkerbus_reporting_processes", {}, "tinkerbus_reporting_processes"),  # the exporter's own
        ("tinkerbus_steps_total", {"model": "m", "request_id": "r"}, "no label request_id"),
        ("tinkerbus_steps_total", {}, "needs the label model"),
        ("tinkerbus_operations_total", {"verb": "dance", "outcome": "done"}, "'dance'.*forward_backward"),
        ("tinkerbus_gradient_norm", {"model": "m"}, "not a counter"),
    ],
)
def test_what_the_catalogue_does_not_list_is_refused(recorder, name, labels, says) -> None:
    with pytest.raises(NotInCatalogue, match=says):
        recorder.inc(name, **labels)


def test_each_kind_has_its_verb(recorder) -> None:
    with pytest.raises(NotInCatalogue, match="not a gauge"):
        recorder.set("tinkerbus_steps_total", 1, model="m")
    with pytest.raises(NotInCatalogue, match="not a histogram"):
        recorder.observe("tinkerbus_steps_total", 1, model="m")
    with pytest.raises(NotInCatalogue, match="tenant"):
        Recorder("dispatcher", tenant="demo")


@pytest.mark.parametrize("amount", [-1, math.nan, math.inf])
def test_a_counter_takes_no_amount_it_could_not_come_back_from(recorder, amount) -> None:
    with pytest.raises(ValueError, match="tinkerbus_steps_total takes"):
        recorder.inc("tinkerbus_steps_total", amount, model="m")
    with pytest.raises(ValueError, match="finite"):
        recorder.observe("tinkerbus_operation_duration_seconds", amount, verb="forward", stage="total")
    assert read(recorder, "tinkerbus_steps_total", group="tiny", model="m") is None


def test_counters_of_a_model_begin_at_zero(recorder) -> None:
    assert read(recorder, "tinkerbus_recoveries_total", group="tiny") == 0
    assert read(recorder, "tinkerbus_operations_total", group="tiny", verb="forward", outcome="done") == 0
    assert read(recorder, "tinkerbus_steps_total", group="tiny", model="m") is None
    recorder.begin(model="m")
    for name in ("steps", "steps_skipped", "rollout_tokens", "clipped_tokens"):
        assert read(recorder, f"tinkerbus_{name}_total", group="tiny", model="m") == 0
    assert read(recorder, "tinkerbus_gradient_norm", group="tiny", model="m") is None


def test_a_removed_model_leaves_no_series(recorder) -> None:
    for model in ("m", "n"):
        recorder.begin(model=model)
        recorder.set("tinkerbus_gradient_norm", 1.0, model=model)
    recorder.remove(model="m")
    labels = [sample.labels.get("model") for sample in recorder.snapshot().samples]
    assert "m" not in labels
    assert "n" in labels
    assert [removal.labels for removal in recorder.snapshot().removals] == [{"model": "m"}]
    with pytest.raises(NotInCatalogue):
        recorder.remove()


@pytest.mark.parametrize(("seconds", "bucket"), [(0.0005, "0.001"), (7.0, "10.0"), (3599.0, "3600.0")])
def test_a_duration_lands_in_a_finite_bucket_up_to_an_hour(recorder, seconds, bucket) -> None:
    recorder.observe("tinkerbus_operation_duration_seconds", seconds, verb="forward", stage="total")
    labels = {"group": "tiny", "verb": "forward", "stage": "total"}
    assert read(recorder, "tinkerbus_operation_duration_seconds_bucket", **labels, le=bucket) == 1
    assert read(recorder, "tinkerbus_operation_duration_seconds_sum", **labels) == seconds


def test_gauges_can_be_read_off_just_before_a_snapshot(recorder) -> None:
    waiting = [1, 2, 3]
    recorder.before_snapshot(lambda: recorder.set("tinkerbus_queue_depth", len(waiting), model="m"))
    assert read(recorder, "tinkerbus_queue_depth", group="tiny", model="m") == 3
    waiting.clear()
    assert read(recorder, "tinkerbus_queue_depth", group="tiny", model="m") == 0


def test_threads_lose_no_count(recorder) -> None:
    def count(_: int) -> None:
        for _ in range(500):
            recorder.inc("tinkerbus_steps_total", model="m")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(count, range(4)))
    assert read(recorder, "tinkerbus_steps_total", group="tiny", model="m") == 2000


def test_a_snapshot_survives_the_wire_and_a_newer_format_is_refused_by_number(recorder) -> None:
    snapshot = recorder.snapshot()
    assert decode(encode(snapshot)) == snapshot
    newer = Snapshot(process="p", incarnation="i", number=1, samples=(), format=FORMAT + 1)
    with pytest.raises(UnreadableSnapshot, match=f"format {FORMAT + 1} is newer than {FORMAT}"):
        decode(encode(newer))
    for junk in (b"", b"junk", b"\x80", b"\xc1"):
        with pytest.raises(UnreadableSnapshot):
            decode(junk)


def test_changes_are_what_has_happened_since_the_state_was_told_whole(recorder) -> None:
    recorder.begin(model="m")
    whole = recorder.snapshot()
    assert whole.since is None
    assert recorder.changes().samples == ()
    recorder.inc("tinkerbus_steps_total", model="m")
    recorder.set("tinkerbus_gradient_norm", 2.0, model="m")
    for _ in range(2):  # the second one would make up for a first one that was lost
        changes = recorder.changes()
        assert changes.since == whole.number
        assert {(s.name, s.value) for s in changes.samples} == {
            ("tinkerbus_steps_total", 1.0),
            ("tinkerbus_gradient_norm", 2.0),
        }
    again = recorder.snapshot()
    assert len(again.samples) == len(whole.samples) + 1
    assert recorder.changes().samples == ()


def test_changes_of_a_histogram_are_the_buckets_that_grew(recorder) -> None:
    recorder.snapshot()
    recorder.observe("tinkerbus_operation_duration_seconds", 1e9, verb="forward", stage="total")
    changed = recorder.changes().samples
    assert {s.labels.get("le") for s in changed} == {"+Inf", None}
    assert {s.name.rpartition("_")[2] for s in changed} == {"bucket", "count", "sum"}
