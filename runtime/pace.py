"""How much work stands at the ranks: enough that they never wait for the next, too little to make others wait.

Pure. Operations that take long go to the ranks one at a time, so that whoever comes meanwhile waits for one of them at
most; of short ones, several are on their way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bus.log import LogEntry
from runtime.job import Job

AHEAD_S = 0.05
"""The next operation goes to the ranks when those before it are expected to take no longer than this."""
TOGETHER_S = 0.25
"""Small requests of one model go as one pass while it is expected to take no longer than this."""
_RECENT = 0.3
"""Weight of the newest measurement."""
_SAME_PASS_S = 0.001
"""Answers that come as close behind each other are of one pass."""


class Pace:
    """Operations at one group's ranks, which answer in the order in which they were handed over.

    Times are seconds, as `time.monotonic()`.
    """

    def __init__(self, ahead_s: float = AHEAD_S) -> None:
        self._ahead_s = ahead_s
        self._at_ranks: dict[str, tuple[Job, float]] = {}
        """With the time at which each was handed over."""
        self._answered = -math.inf
        """When the newest answer came."""
        self._cost: dict[tuple[str, str], float] = {}
        """Seconds per unit of size, by model and verb."""
        self._pass: _Measured | None = None
        """The newest."""

    def handed_over(self, job: Job, now: float) -> float:
        """The ranks will work on it; for how long, as far as that is known, else 0."""
        self._at_ranks[job.entry.request_id] = (job, now)
        expected = self._expected(job)
        return expected if expected < math.inf else 0.0

    def answered(self, job: Job, now: float) -> float:
        """The ranks are done with it; the seconds that they worked on it."""
        _, handed_over = self._at_ranks.pop(job.entry.request_id)
        took = now - max(handed_over, self._answered)
        self._answered = now
        self._measure(_kind(job), _size(job), took)
        return took

    def _measure(self, kind: tuple[str, str], size: int, took: float) -> None:
        last = self._pass
        if last is None or last.kind != kind or took >= _SAME_PASS_S:
            last = self._pass = _Measured(kind, self._cost.get(kind))
        last.size += size
        last.seconds += took
        cost = last.seconds / last.size
        before = cost if last.before is None else last.before
        self._cost[kind] = (1 - _RECENT) * before + _RECENT * cost

    def goes_along(self, first: Job, others: Sequence[LogEntry], entry: LogEntry) -> bool:
        """Whether a pass of `first` and `others`, of one model and verb, may carry this request of theirs too."""
        sizes = [_size(first), *(other.size for other in others), entry.size]
        return self._cost.get(_kind(first), math.inf) * sum(sizes) <= TOGETHER_S

    def forget(self, model_id: str) -> None:
        """The model has ended."""
        self._cost = {key: cost for key, cost in self._cost.items() if key[0] != model_id}

    def room_in(self, now: float) -> float:
        """Seconds until the next operation may go to the ranks; infinity while only an answer makes room."""
        if not self._at_ranks:
            return 0.0
        (first, handed_over), *others = self._at_ranks.values()
        others_take = sum(self._expected(job) for job, _ in others)
        if others_take > self._ahead_s:
            return math.inf
        done = max(handed_over, self._answered) + self._expected(first)
        return max(0.0, max(0.0, done - now) + others_take - self._ahead_s)

    def _expected(self, job: Job) -> float:
        """Infinity for what was never measured."""
        return self._cost.get(_kind(job), math.inf) * _size(job)


@dataclass(slots=True)
class _Measured:
    """One pass, request by request as its answers come."""

    kind: tuple[str, str]
    before: float | None
    """What its kind cost by the passes before."""
    size: int = 0
    seconds: float = 0.0


def _kind(job: Job) -> tuple[str, str]:
    return job.entry.model_id, job.verb


def _size(job: Job) -> int:
    """What the time of a pass grows with; every other verb takes the time it takes."""
    return max(1, job.entry.size) if job.verb in ("forward", "forward_backward") else 1
