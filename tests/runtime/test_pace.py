"""How much stands at the ranks. Pure: the clock is the test's."""

from __future__ import annotations

import math

from bus.log import entry
from runtime.job import Job
from runtime.pace import TOGETHER_S, Pace

AHEAD = 0.05


def job(size: int, seq_id: int, verb: str = "forward_backward", model_id: str = "m") -> Job:
    return Job(entry("t", model_id, seq_id, verb, b"x" * size), verb, 0.0, 0.0)


def measured(rate_s: float, size: int = 100) -> Pace:
    """One that knows that a pass takes `rate_s` per `size` bytes."""
    pace = Pace(AHEAD)
    known = job(size, 0)
    pace.handed_over(known, 0.0)
    pace.answered(known, rate_s)
    return pace


def test_idle_ranks_get_the_next_operation_at_once() -> None:
    assert Pace(AHEAD).room_in(5.0) == 0.0


def test_what_was_never_measured_runs_alone() -> None:
    pace = Pace(AHEAD)
    first = job(10, 0)
    pace.handed_over(first, 1.0)
    assert pace.room_in(1.0) == math.inf
    pace.answered(first, 3.0)
    assert pace.room_in(3.0) == 0.0


def test_the_next_goes_when_the_one_that_runs_is_almost_done() -> None:
    pace = measured(1.0)
    pace.handed_over(job(200, 2), 10.0)  # expected to take 2 s
    assert math.isclose(pace.room_in(10.5), 1.5 - AHEAD)
    assert pace.room_in(11.96) == 0.0
    pace.handed_over(job(100, 3), 11.96)
    # A long one stands behind it: nothing more until there is an answer.
    assert pace.room_in(11.96) == math.inf
    assert pace.room_in(99.0) == math.inf


def test_short_ones_are_on_their_way_together() -> None:
    pace = measured(0.02)
    for seq_id in range(2, 5):
        assert pace.room_in(10.0) == 0.0
        pace.handed_over(job(100, seq_id), 10.0)
    assert 0.0 < pace.room_in(10.0) <= 0.02


def test_time_is_counted_from_the_answer_before() -> None:
    pace = Pace(AHEAD)
    one, two = job(10, 0), job(10, 1)
    pace.handed_over(one, 0.0)
    pace.handed_over(two, 1.0)
    assert pace.answered(one, 4.0) == 4.0
    assert pace.answered(two, 7.0) == 3.0


def test_verbs_and_models_are_measured_apart() -> None:
    pace = measured(0.001)
    step = job(100, 2, "optim_step")
    pace.handed_over(step, 10.0)
    assert pace.room_in(10.0) == math.inf
    pace.answered(step, 10.01)
    other = job(100, 0, model_id="other")
    pace.handed_over(other, 11.0)
    assert pace.room_in(11.0) == math.inf
    pace.answered(other, 11.1)
    pace.forget("m")
    pace.handed_over(job(100, 3), 12.0)
    assert pace.room_in(12.0) == math.inf


def test_what_is_handed_over_is_told_with_the_time_that_it_will_take() -> None:
    pace = Pace(AHEAD)
    assert pace.handed_over(job(100, 0), 0.0) == 0.0  # not known
    assert math.isclose(measured(0.5).handed_over(job(200, 1), 9.0), 1.0)


def test_a_pass_of_several_is_measured_as_a_whole() -> None:
    pace, alone = Pace(AHEAD), Pace(AHEAD)
    several = [job(100, seq_id) for seq_id in range(4)]
    for one in several:
        pace.handed_over(one, 0.0)
    assert sum(pace.answered(one, 0.4) for one in several) == 0.4  # all at the end of the pass
    one = job(400, 0)
    alone.handed_over(one, 0.0)
    alone.answered(one, 0.4)
    assert math.isclose(
        pace.handed_over(job(100, 9), 1.0), alone.handed_over(job(100, 9), 1.0), rel_tol=1e-12
    )


def test_small_requests_go_along_until_their_pass_takes_long() -> None:
    pace = measured(TOGETHER_S / 4)  # for 100 bytes
    first = job(100, 2)
    small = [job(100, seq_id).entry for seq_id in range(3, 7)]
    assert pace.goes_along(first, [], small[0])
    assert pace.goes_along(first, small[:2], small[2])
    assert not pace.goes_along(first, small[:3], small[3])
    assert not pace.goes_along(first, [], job(400, 3).entry)


def test_nothing_goes_along_with_what_was_never_measured_or_takes_long_itself() -> None:
    assert not Pace(AHEAD).goes_along(job(1, 0), [], job(1, 1).entry)
    assert not measured(1.0).goes_along(job(100, 2), [], job(1, 3).entry)
