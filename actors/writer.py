"""Writing files in a thread of its own, one after the other, while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

REMEMBERED = 256
"""Files whose outcome can still be asked for: ranks finish at different times, and are asked until all have."""


class Writer:
    """Of one rank."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._begun: dict[Path, Future[None]] = {}

    def begin(self, file: Path, write: Callable[[], None]) -> None:
        """`write` makes the file, and returns once it is on the disk."""
        over = [old for old, writing in self._begun.items() if writing.done()]
        for old in over[:-REMEMBERED]:
            del self._begun[old]
        self._begun[file] = self._thread.submit(write)

    def outcome(self, file: Path) -> str | None:
        """None while `file` is being written; then "" for success, or the error."""
        writing = self._begun[file]
        if not writing.done():
            return None
        error = writing.exception()
        return "" if error is None else f"{type(error).__name__}: {error}"
