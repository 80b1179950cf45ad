"""What the memory benchmark makes of its samples."""

from __future__ import annotations

import os

import psutil
import pytest

from benchmarks.memory import Process, Watch, name_of, slope


def test_the_slope_is_that_of_the_line_through_the_samples() -> None:
    line = [(requests, 7 + 0.002 * requests) for requests in range(0, 1000, 50)]
    assert slope(line) == pytest.approx(2.0)
    assert slope([(requests, 7.0) for requests in range(0, 1000, 50)]) == 0.0
    assert slope(line[:2]) is None


def test_what_comes_while_it_warms_up_does_not_count() -> None:
    warming = [(requests, 0.1 * requests) for requests in range(0, 500, 50)]
    process = Process("p", 1, warming + [(requests, 50.0) for requests in range(500, 1000, 50)])
    assert process.slope(500) == pytest.approx(0.0)


def test_a_process_is_watched_and_named() -> None:
    watch = Watch(psutil.Process())
    for requests in (0, 50):
        watch.sample(requests)
    mine = watch.processes[os.getpid()]
    assert mine.name == name_of(psutil.Process())
    assert [requests for requests, _ in mine.samples] == [0, 50]
    assert all(own > 1 for _, own in mine.samples)
    assert mine in watch.lasting()
