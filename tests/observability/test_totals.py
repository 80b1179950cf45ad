"""Merging processes that restart, overlap, fall silent and come back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from observability.publisher import WHOLE_EVERY
from observability.recorder import Recorder
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


def told(totals: Totals) -> dict[tuple[str, ...], float]:
    return {(s.name, *sorted(s.labels.values())): s.value for s in totals.samples(0)}


DEEDS = st.lists(
    st.tuples(st.sampled_from(["inc", "set", "observe", "begin", "remove"]), st.sampled_from("mn")),
    max_size=4,
)


@given(turns=st.lists(st.tuples(DEEDS, st.booleans()), max_size=3 * WHOLE_EVERY))
def test_told_whole_or_by_its_changes_and_whatever_is_lost_a_process_ends_with_the_same_series(
    turns: list[tuple[list[tuple[str, str]], bool]],
) -> None:
    recorder, totals, before = Recorder("p", group="g"), Totals(), 0.0
    for number, (deeds, lost) in enumerate(turns):
        for deed, model in deeds:
            match deed:
                case "inc":
                    recorder.inc(STEPS, model=model)
                case "set":
                    recorder.set(NORM, float(number), model=model)
                case "observe":
                    recorder.observe(
                        "tinkerbus_operation_duration_seconds", number, verb="forward", stage="total"
                    )
                case "begin":
                    recorder.begin(model=model)
                case "remove":
                    recorder.remove(model=model)
        said = recorder.snapshot() if number % WHOLE_EVERY == 0 else recorder.changes()
        if not lost:
            totals.add(said, 0)
        now = sum(v for key, v in told(totals).items() if key[0].endswith("_seconds_count"))
        assert now >= before
        before = now
    whole = recorder.snapshot()
    totals.add(whole, 0)
    expected = {(s.name, *sorted(s.labels.values())): s.value for s in whole.samples}
    assert told(totals) == expected


def test_changes_of_what_was_never_heard_say_that_the_process_lives_and_no_more() -> None:
    totals = Totals()
    change = Snapshot(process="p", incarnation="a", number=2, since=1, samples=(Sample(STEPS, M, 9.0),))
    totals.add(change, 0)
    assert (read(totals, STEPS), totals.processes(0)) == ([], 0)
    totals.add(snapshot("a", 6, steps=10), 0)
    totals.add(
        Snapshot(process="p", incarnation="a", number=7, since=5, samples=(Sample(STEPS, M, 99.0),)), 9
    )
    assert (read(totals, STEPS, 9), totals.processes(15)) == ([10], 1)


def test_a_model_that_is_removed_and_begins_anew_between_two_whole_states_counts_from_zero() -> None:
    recorder, totals = Recorder("p", group="g"), Totals()
    recorder.inc(STEPS, model="m")
    totals.add(recorder.snapshot(), 0)
    recorder.remove(model="m")
    recorder.inc(STEPS, 2, model="m")
    totals.add(recorder.changes(), 0)
    assert read(totals, STEPS) == [2]
