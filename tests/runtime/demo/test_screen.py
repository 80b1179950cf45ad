"""Plain lines where there is no terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from runtime.demo.screen import Screen


@pytest.fixture
def written() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def screen(written: io.StringIO) -> Screen:
    return Screen(Console(file=written, width=40))


def test_minor_words_are_left_out_and_lines_are_never_broken(screen: Screen, written: io.StringIO) -> None:
    with screen.phase("a", "a title [1]" + 50 * "x"):
        screen.working("step 1", minor=True)
        screen.working("step 10")
        screen.line("[b]" + 60 * "x")
    assert written.getvalue() == f"a title [1]{50 * 'x'}\n  step 10\n  [b]{60 * 'x'}\n"


def test_each_phase_is_timed_also_one_that_fails(screen: Screen) -> None:
    with pytest.raises(ZeroDivisionError), screen.phase("a", "a"):
        raise ZeroDivisionError
    assert screen.seconds["a"] >= 0
