"""Files written in the background: asked after until they are there, or have failed."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from actors.writer import Writer


def settled(writer: Writer, file: Path) -> str:
    deadline = time.monotonic() + 10
    while (outcome := writer.outcome(file)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return outcome


def test_each_file_is_written_in_turn_and_its_outcome_stays(tmp_path: Path) -> None:
    writer, go = Writer(), threading.Event()
    first, second = tmp_path / "first", tmp_path / "second"
    writer.begin(first, lambda: go.wait() and first.write_text("1") and None)
    writer.begin(second, lambda: second.write_text(first.read_text()) and None)
    assert writer.outcome(first) is None
    assert writer.outcome(second) is None
    go.set()
    assert settled(writer, second) == ""
    assert [writer.outcome(first), writer.outcome(first)] == ["", ""]  # another rank may not be done yet
    assert second.read_text() == "1"


def test_what_goes_wrong_is_said(tmp_path: Path) -> None:
    writer, file = Writer(), tmp_path / "missing" / "file"
    writer.begin(file, lambda: file.write_text("x") and None)
    assert "No such file" in settled(writer, file)
    with pytest.raises(KeyError):
        writer.outcome(tmp_path / "never")
