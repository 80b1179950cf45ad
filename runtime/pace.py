"""How much work stands at the ranks: enough that they never wait for the next, too little to make others wait.

Pure. Operations that take long go to the ranks one at a time, so that whoever comes meanwhile waits for one of them at
most; of short ones, several are on their way.
"""

from __future__ import annotations

import math

from runtime.job import Job

AHEAD_S = 0.05
"""The next operation goes to the ranks when those before it are expected to take no longer than this."""
_RECENT = 0.3
"""Weight of the newest measurement."""


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
        key, cost = _kind(job), took / _size(job)
        self._cost[key] = (1 - _RECENT) * self._cost.get(key, cost) + _RECENT * cost
        return took

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


def _kind(job: Job) -> tuple[str, str]:
    return job.entry.model_id, job.verb


def _size(job: Job) -> int:
    """What the time of a pass grows with; every other verb takes the time it takes."""
    return max(1, job.entry.size) if job.verb in ("forward", "forward_backward") else 1
