"""Merging processes that restart, overlap, fall silent and come back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from observability.snapshot import Removal, Sample, Snapshot
from observability.totals import FORGET_AFTER_S, Totals

STEPS, NORM = "tinkerbus_steps_total", "tinkerbus_gradient_norm"
M = {"group": "g", "model": "m"}


def snapshot(
    incarnation: str = "a",
    number: int = 1,
    steps: float | None = None,
    norm: float | None = None,
    process: str = "dispatcher",
    removals: tuple[Removal, ...] = (),
    labels: dict[str, str] = M,
) -> Snapshot:
    samples = [Sample(STEPS, labels, steps)] if steps is not None else []
    samples += [Sample(NORM, labels, norm)] if norm is not None else []
    return Snapshot(
        process=process, incarnation=incarnation, number=number, samples=tuple(samples), removals=removals
    )


def read(totals: Totals, name: str, now: float = 0.0) -> list[float]:
    return [sample.value for sample in totals.samples(now) if sample.name == name]


def test_counters_add_up_over_processes() -> None:
    totals = Totals()
    totals.add(snapshot("a", steps=3, process="ingress-1"), 0)
    totals.add(snapshot("b", steps=4, process="ingress-2"), 0)
    assert read(totals, STEPS) == [7]
    assert totals.processes(0) == 2


def test_a_restarted_process_goes_on_where_the_dead_one_ended() -> None:
    totals = Totals()
    totals.add(snapshot("a", 1, steps=3), 0)
    totals.add(snapshot("a", 2, steps=5), 1)
    totals.add(snapshot("b", 1, steps=0), 2)
    assert read(totals, STEPS, 2) == [5]
    totals.add(snapshot("b", 2, steps=2), 3)
    assert read(totals, STEPS, 3) == [7]
    assert totals.processes(3) == 1


def test_old_and_new_replica_may_overlap() -> None:
    totals = Totals()
    totals.add(snapshot("old", 1, steps=10), 0)
    totals.add(snapshot("new", 1, steps=1), 0.5)
    totals.add(snapshot("old", 2, steps=11), 1)
    totals.add(snapshot("new", 2, steps=2), 1.5)
    assert read(totals, STEPS, 2) == [13]


def test_late_and_repeated_messages_change_nothing() -> None:
    totals = Totals()
    totals.add(snapshot("a", 2, steps=5, norm=2.0), 0)
    totals.add(snapshot("a", 1, steps=4, norm=1.0), 1)
    totals.add(snapshot("a", 2, steps=5, norm=2.0), 1)
    assert read(totals, STEPS) == [5]
    assert read(totals, NORM) == [2.0]


def test_gauges_of_a_silent_process_vanish_after_ten_seconds_and_its_counts_stay() -> None:
    totals = Totals()
    totals.add(snapshot(steps=5, norm=2.0), 0)
    assert read(totals, NORM, 10.0) == [2.0]
    assert read(totals, NORM, 10.1) == []
    assert read(totals, STEPS, 10.1) == [5]
    assert totals.processes(10.1) == 0


def test_a_gauge_is_that_of_the_process_that_spoke_last() -> None:
    totals = Totals()
    totals.add(snapshot("a", 7, norm=1.0), 0)
    totals.add(snapshot("b", 1, norm=2.0), 1)
    assert read(totals, NORM, 1) == [2.0]
    totals.add(snapshot("b", 9, norm=2.0), 2)
    totals.add(snapshot("a", 8, norm=3.0), 3)
    assert read(totals, NORM, 3) == [3.0]


def test_a_process_that_wakes_up_after_being_forgotten_is_not_counted_twice() -> None:
    totals = Totals()
    totals.add(snapshot("a", 1, steps=5), 0)
    later = FORGET_AFTER_S + 1
    assert read(totals, STEPS, later) == [5]
    totals.add(snapshot("a", 2, steps=6), later)
    assert read(totals, STEPS, later) == [5]
    totals.add(snapshot("a", 3, steps=8), later + 1)
    assert read(totals, STEPS, later + 1) == [7]


def test_a_removed_model_is_gone_also_from_what_dead_processes_left() -> None:
    totals = Totals()
    other = {"group": "g", "model": "other"}
    totals.add(snapshot("dead", steps=5, norm=1.0), 0)
    totals.add(snapshot("dead-2", steps=1, labels=other), 0)
    totals.add(snapshot("a", 1, removals=(Removal(1, {"model": "m"}),)), 1)
    assert read(totals, NORM, 1) == []
    assert read(totals, STEPS, 1) == [1]
    # The removal is repeated for a minute; a model that begins anew meanwhile counts from 0.
    totals.add(snapshot("a", 2, steps=2, removals=(Removal(1, {"model": "m"}),)), 2)
    totals.add(snapshot("a", 3, steps=3, removals=(Removal(1, {"model": "m"}),)), 3)
    assert sorted(read(totals, STEPS, 3)) == [1, 3]


def test_a_sample_the_catalogue_does_not_list_is_left_out() -> None:
    totals = Totals()
    stranger = Snapshot(
        process="p", incarnation="i", number=1, samples=(Sample("process_cpu_seconds_total", {}, 1.0),)
    )
    totals.add(stranger, 0)
    assert list(totals.samples(0)) == []


@given(lives=st.lists(st.lists(st.integers(0, 5), max_size=6), max_size=6), lost=st.integers(0, 3))
def test_the_total_never_goes_back_and_ends_at_what_was_last_heard(lives: list[list[int]], lost: int) -> None:
    totals, heard, before = Totals(), 0, 0.0
    for life, increments in enumerate(lives):
        count, last_heard = 0, 0
        for number, increment in enumerate(increments, start=1):
            count += increment
            if (number + life) % 4 >= lost:  # the others get lost on the way
                totals.add(snapshot(str(life), number, steps=count), life)
                last_heard = count
                (now,) = read(totals, STEPS, life)
                assert now >= before
                before = now
        heard += last_heard
    assert before == heard
