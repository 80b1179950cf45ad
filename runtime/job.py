"""One operation between its turn and its result."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bus.events import Outcome
from bus.log import LogEntry


@dataclass(slots=True)
class Job:
    """The entry, what was handed to the ranks for it, and what comes of it."""

    entry: LogEntry
    verb: str
    """As metrics name it: "forward" apart from "forward_backward"."""
    accepted: float
    """`time.monotonic()` when it was read off the log."""
    started: float
    """When its turn came."""
    ranks: asyncio.Future[Any] | None = None
    """The ranks' answer to come; None where the outcome is known without them."""
    outcome: Outcome | None = None
    """Set at once, or by `finish`."""
    finish: Callable[[Any], Outcome] | None = None
    """From the ranks' answer to the outcome; None when `outcome` stands whatever they answer."""
    after: Callable[[], Awaitable[Outcome]] | None = None
    """What is left to do once the ranks have answered, while they go on: it comes to the outcome."""
    behind: Sequence[Job] = ()
    """What has to be told before it: a load, by what was computed with those weights; everything, by a model's end."""
    loaded: str | None = None
    """The URL of the checkpoint that the ranks have loaded."""
    charged_s: float = 0.0
    """Rank time that its tenant was charged with when it was handed over."""
    loses_gradient: bool = False
    """A failure of this operation takes a gradient out of the model's window."""
    horizon: int | None = None
    """Of such a failure: the log's last position when it became known."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its result is published and its ledger row written."""
