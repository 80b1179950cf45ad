"""What the demo prints: a spinner with the latest word on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.status import Status


class Screen:
    """One phase at a time."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._status: Status | None = None
        self.seconds: dict[str, float] = {}
        """How long each finished phase took."""

    @contextmanager
    def phase(self, name: str, title: str) -> Iterator[None]:
        """Say what begins; `name` is what it is timed under."""
        began = time.monotonic()
        self._console.print(title, style="bold", soft_wrap=True)
        try:
            if self._console.is_terminal:
                with self._console.status("working …") as self._status:
                    yield
            else:
                yield
        finally:
            self._status = None
            self.seconds[name] = time.monotonic() - began

    def working(self, word: str, *, minor: bool = False) -> None:
        """What is being done just now. A minor word is for terminals only, where it is soon overwritten."""
        if self._status is not None:
            self._status.update(word)
        elif not minor:
            self.line(word)

    def line(self, text: str) -> None:
        self._console.print(f"  {text}", markup=False, soft_wrap=True)

    def show(self, what: RenderableType) -> None:
        self._console.print(what)
