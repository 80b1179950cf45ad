from __future__ import annotations

from dataclasses import replace

from bus import log
from bus.tables import BacklogRow
from runtime.unfinished import Unfinished


def entry(model_id: str, seq_id: int | None, position: int, size: int = 10) -> log.LogEntry:
    return replace(log.entry("t", model_id, seq_id, "optim_step", bytes(size)), position=position)


def test_what_is_read_counts_until_it_has_its_result() -> None:
    unfinished = Unfinished()
    entries = [entry("a", 2, 1), entry("a", 1, 2, size=5), entry("b", 1, 3)]
    for one in entries:
        unfinished.read(one)
    unfinished.read(entry("b", 0, 4), waits=False)
    assert unfinished.row() == BacklogRow(position=4, models={"a": (2, 15), "b": (1, 10)})
    unfinished.finish(entries[1])
    unfinished.finish(entries[1])
    unfinished.finish(entries[2])
    assert unfinished.row() == BacklogRow(position=4, models={"a": (1, 10)})


def test_a_model_that_has_ended_has_nothing_waiting() -> None:
    unfinished = Unfinished()
    unfinished.read(entry("a", 7, 1))
    unfinished.read(entry("a", None, 2))
    unfinished.finish(entry("a", None, 2))
    assert unfinished.row() == BacklogRow(position=2)
