"""Whose turn it is, for any order of arrival. Pure: no broker, no ranks."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from bus.log import LogEntry
from runtime.sequencer import GAP, Sequencer


def entry(model: str, seq_id: int | None, position: int, verb: str = "forward_backward") -> LogEntry:
    return LogEntry(
        tenant="t",
        model_id=model,
        seq_id=seq_id,
        verb="unload_model" if seq_id is None else verb,
        content_type="application/msgpack",
        body=b"",
        body_hash="",
        position=position,
    )


def drained(sequencer: Sequencer) -> list[tuple[str, int | None, int | None]]:
    turns = []
    while (turn := sequencer.next_turn()) is not None:
        turns.append((turn.entry.model_id, turn.entry.seq_id, turn.lost))
    return turns


def offered(*entries: LogEntry) -> Sequencer:
    sequencer = Sequencer()
    for one in entries:
        sequencer.offer(one)
    return sequencer


@given(st.permutations(range(9)))
def test_a_model_runs_in_seq_id_order_whatever_order_it_arrives_in(order: list[int]) -> None:
    sequencer = Sequencer()
    turns = []
    for position, seq_id in enumerate(order, 1):
        sequencer.offer(entry("m", seq_id, position))
        turns += drained(sequencer)
    assert turns == [("m", seq_id, None) for seq_id in range(9)]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 6)), unique=True, max_size=21))
def test_every_model_runs_exactly_its_unbroken_beginning(arrivals: list[tuple[str, int]]) -> None:
    sequencer = offered(*(entry(m, n, position) for position, (m, n) in enumerate(arrivals, 1)))
    turns = drained(sequencer)
    for model in "abc":
        numbers = {n for m, n in arrivals if m == model}
        beginning = next(n for n in range(8) if n not in numbers)
        assert [n for m, n, _ in turns if m == model] == list(range(beginning))
        waits = beginning in sequencer.missing().values() and model in sequencer.missing()
        assert waits == bool(numbers - set(range(beginning)))


def test_a_gap_holds_its_own_model_and_no_other() -> None:
    sequencer = offered(entry("a", 0, 1), entry("a", 2, 2), entry("b", 0, 3), entry("b", 1, 4))
    assert drained(sequencer) == [("a", 0, None), ("b", 0, None), ("b", 1, None)]
    assert sequencer.missing() == {"a": 1}
    assert sequencer.depth() == {"a": 1}
    sequencer.offer(entry("a", 1, 5))
    assert drained(sequencer) == [("a", 1, None), ("a", 2, None)]
    assert sequencer.missing() == {}


def test_models_with_work_take_turns() -> None:
    sequencer = offered(*(entry("a", n, n + 1) for n in range(4)), *(entry("b", n, n + 5) for n in range(2)))
    assert [model for model, _, _ in drained(sequencer)] == ["a", "b", "a", "b", "a", "a"]


def test_a_number_seen_already_has_no_second_turn() -> None:
    sequencer = offered(entry("m", 0, 1))
    assert len(drained(sequencer)) == 1
    sequencer.offer(entry("m", 0, 2))
    assert drained(sequencer) == []


def test_what_waited_for_a_number_that_never_came_fails_and_names_it() -> None:
    sequencer = offered(entry("m", 0, 1), entry("m", 2, 2), entry("m", 3, 3))
    drained(sequencer)
    sequencer.offer(entry("m", 1, 4, verb=GAP))
    sequencer.offer(entry("m", 4, 5))
    assert drained(sequencer) == [("m", 1, None), ("m", 2, 1), ("m", 3, 1), ("m", 4, None)]


def test_replaying_a_log_with_a_gap_decides_as_the_first_run_did() -> None:
    log = [entry("m", 0, 1), entry("m", 2, 2), entry("m", 1, 3, verb=GAP), entry("m", 3, 4)]
    live = Sequencer()
    first = []
    for one in log:
        live.offer(one)
        first += drained(live)
    assert drained(offered(*log)) == first == [("m", 0, None), ("m", 1, None), ("m", 2, 1), ("m", 3, None)]


def test_unload_comes_after_everything_logged_before_it() -> None:
    sequencer = offered(entry("m", 0, 1), entry("m", 2, 2), entry("m", 1, 3), entry("m", None, 4))
    assert drained(sequencer) == [("m", 0, None), ("m", 1, None), ("m", 2, None), ("m", None, None)]


def test_what_is_held_by_a_gap_when_the_model_ends_fails_first() -> None:
    sequencer = offered(entry("m", 0, 1), entry("m", 2, 2), entry("m", 3, 3), entry("m", None, 4))
    assert drained(sequencer) == [("m", 0, None), ("m", 2, 1), ("m", 3, 1), ("m", None, None)]


@given(st.data())
def test_a_sequencer_resumed_from_a_snapshot_gives_the_turns_that_were_left(data: st.DataObject) -> None:
    count = 12
    arrival = data.draw(st.permutations(range(count)))
    missing = data.draw(st.sets(st.sampled_from(range(count)), max_size=2))
    ends = data.draw(st.booleans())
    log = [
        entry("m", seq_id, position, verb=GAP if seq_id in missing else "forward_backward")
        for position, seq_id in enumerate(arrival, 1)
    ]
    if ends:
        log.append(entry("m", None, count + 1))
    read = data.draw(st.integers(1, len(log)))
    first = offered(*log[:read])
    left = data.draw(st.integers(0, count))
    begun = []
    while len(begun) < left and (turn := first.next_turn()) is not None:
        begun.append((turn.entry.model_id, turn.entry.seq_id, turn.lost))
    if first.ended("m"):
        return  # nobody takes a snapshot of a model that has ended
    state = first.state("m", read)
    for later in log[read:]:
        first.offer(later)

    second = Sequencer()
    second.resume("m", state)
    for again in log:
        if again.position is not None and again.position >= state.log_from:
            second.offer(again)
    assert drained(second) == drained(first)


def test_a_number_that_had_its_turn_is_taken_also_after_a_snapshot() -> None:
    sequencer = offered(entry("m", 0, 1), entry("m", 1, 2))
    assert not sequencer.taken("m", 0)
    sequencer.next_turn()
    assert sequencer.taken("m", 0)
    assert not sequencer.taken("m", 1)
    resumed = Sequencer()
    resumed.resume("m", sequencer.state("m", 2))
    assert resumed.taken("m", 0)
    assert not resumed.taken("m", 1)
    assert not resumed.taken("m", None)
    assert not resumed.taken("other", 0)


def test_the_tenant_that_used_less_rank_time_is_next() -> None:
    sequencer = offered(
        *(replace(entry("a1", n, n + 1), tenant="a") for n in range(3)),
        *(replace(entry("b1", n, n + 4), tenant="b") for n in range(3)),
    )
    sequencer.charge("a", 5.0)
    sequencer.charge("b", 1.0)
    assert [model for model, _, _ in drained(sequencer)] == ["b1", "b1", "b1", "a1", "a1", "a1"]


def test_old_entries_are_done_with_while_new_ones_keep_coming() -> None:
    sequencer = offered(entry("a", 0, 1), entry("b", 0, 2), entry("c", 1, 3), entry("a", 1, 4))
    assert sequencer.ready_up_to(3)
    assert [sequencer.next_turn() is not None for _ in range(2)] == [True, True]
    # "a" goes on with what came later; "c" waits for a number that is not there.
    assert not sequencer.ready_up_to(3)
    assert sequencer.ready_up_to(4)
    assert sequencer.missing() == {"c": 0}


def test_what_goes_along_with_a_turn_is_the_models_next_number_and_leaves_the_rotation_when_it_was_the_last() -> (
    None
):
    sequencer = offered(
        entry("m", 0, 1), entry("m", 1, 2), entry("m", 2, 3), entry("m", 4, 4), entry("n", 0, 5)
    )
    first = sequencer.next_turn()
    assert first is not None
    assert (first.entry.model_id, first.entry.seq_id) == ("m", 0)
    for number in (1, 2):
        ahead = sequencer.ahead("m")
        assert ahead is not None
        assert sequencer.follow("m").entry is ahead
        assert ahead.seq_id == number
    assert sequencer.ahead("m") is None  # number 3 is missing
    assert drained(sequencer) == [("n", 0, None)]
    sequencer.offer(entry("m", 3, 6))
    assert drained(sequencer) == [("m", 3, None), ("m", 4, None)]


def test_what_comes_after_a_models_end_has_its_turn_at_once_whatever_its_number() -> None:
    sequencer = offered(entry("m", 0, 1), entry("m", None, 2))
    assert drained(sequencer) == [("m", 0, None), ("m", None, None)]
    assert not sequencer.taken("m", 0)
    for number in (0, 7):
        sequencer.offer(entry("m", number, 3 + number))
    assert sequencer.missing() == {}
    assert drained(sequencer) == [("m", 0, None), ("m", 7, None)]


def test_so_it_is_for_a_model_that_ended_in_an_earlier_life() -> None:
    sequencer = Sequencer()
    sequencer.end("m")
    sequencer.offer(entry("m", 4, 9))
    sequencer.offer(entry("m", None, 10))
    assert drained(sequencer) == [("m", 4, None), ("m", None, None)]
