"""Which steps fail because their window lost a call."""

from __future__ import annotations

from runtime.lost_calls import LostCalls, Verdict

RUNS = Verdict(None, frozenset())


def test_a_step_without_losses_runs() -> None:
    assert LostCalls().settle("m", 2, 10) == RUNS


def test_a_step_already_on_the_log_when_the_failure_was_published_fails_and_names_the_call() -> None:
    lost = LostCalls()
    lost.add("m", 1, horizon=10)
    assert lost.settle("m", 3, position=10) == Verdict(1, frozenset())


def test_a_step_sent_afterwards_works_on_what_is_there() -> None:
    lost = LostCalls()
    lost.add("m", 1, horizon=10)
    assert lost.settle("m", 3, position=11) == Verdict(None, frozenset({1}))


def test_of_several_losses_the_first_unknown_one_is_named() -> None:
    lost = LostCalls()
    lost.add("m", 1, horizon=5)
    lost.add("m", 2, horizon=12)
    lost.add("m", 3, horizon=12)
    assert lost.settle("m", 4, position=8) == Verdict(2, frozenset({1}))


def test_a_loss_counts_for_its_own_window_and_model() -> None:
    lost = LostCalls()
    lost.add("m", 1, horizon=10)
    assert lost.settle("other", 3, position=2) == RUNS
    lost.settle("m", 3, position=2)
    assert lost.settle("m", 5, position=4) == RUNS


def test_a_loss_that_becomes_known_after_its_step_is_no_news() -> None:
    lost = LostCalls()
    lost.settle("m", 3, position=4)
    lost.add("m", 2, horizon=20)
    assert lost.settle("m", 6, position=5) == RUNS


def test_a_model_that_ended_is_forgotten() -> None:
    lost = LostCalls()
    lost.add("m", 1, horizon=10)
    lost.forget("m")
    assert lost.settle("m", 2, position=3) == RUNS


def test_a_window_resumed_from_a_snapshot_judges_its_step_as_the_first_would_have() -> None:
    lost = LostCalls()
    lost.settle("m", 2, position=3)
    lost.add("m", 4, horizon=10)
    kept = lost.state("m")
    lost.add("m", 5, horizon=12)  # after the snapshot, which is a copy
    resumed = LostCalls()
    resumed.resume("m", kept)
    resumed.add("m", 1, horizon=20)  # of a window that was over
    assert resumed.settle("m", 6, position=10) == Verdict(4, frozenset())
    assert LostCalls().state("other").horizons == {}
