"""What goes to the ranks, in order: operations one by one, consecutive requests of one model in one pass.

Two operations are at the ranks at a time, one that runs and one that is next. Requests that come meanwhile, of one
model and one kind, wait here and go as one pass, whatever their losses: their microbatches run one after the other,
so each has the bits it has alone, and pipeline stages fill and drain once.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from actors.contract import PassFailed
from actors.group import MegatronGroup, RequestOutput
from actors.packing import PackedRequest

AT_THE_RANKS = 2
MOST_TOGETHER = 4
"""Requests in one pass: all of them are answered at its end."""


@dataclass(slots=True)
class _Waiting:
    model_id: str
    forward_only: bool
    requests: list[PackedRequest] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    answers: list[asyncio.Future[RequestOutput]] = field(default_factory=list)


class Passes:
    """The way to one group's ranks, in the order of the calls."""

    def __init__(self, group: MegatronGroup) -> None:
        self._group = group
        self._running: set[asyncio.Future[Any]] = set()
        self._waiting: _Waiting | None = None

    def forward_backward(
        self, model_id: str, request: PackedRequest, label: int
    ) -> asyncio.Future[RequestOutput]:
        """Raises PassFailed when the request failed on the ranks; the window is then as it was before."""
        waiting = self._waiting
        if waiting is None or (waiting.model_id, waiting.forward_only) != (model_id, request.forward_only):
            self.flush()
            waiting = self._waiting = _Waiting(model_id, request.forward_only)
        answer: asyncio.Future[RequestOutput] = asyncio.get_running_loop().create_future()
        waiting.requests.append(request)
        waiting.labels.append(label)
        waiting.answers.append(answer)
        if len(self._running) < AT_THE_RANKS or len(waiting.requests) == MOST_TOGETHER:
            self.flush()
        return answer

    def group(self) -> MegatronGroup:
        """The group, once everything that came before is on its way. What it is given goes to `track`."""
        self.flush()
        return self._group

    def track(self, operation: asyncio.Future[Any]) -> None:
        """Count it as one that is at the ranks."""
        self._running.add(operation)
        operation.add_done_callback(self._done)

    def flush(self) -> None:
        """Hand over what waits."""
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        together = self._group.forward_backward_together(waiting.model_id, waiting.requests, waiting.labels)
        together.add_done_callback(lambda done: _tell(waiting.answers, done))
        self.track(together)

    def _done(self, operation: asyncio.Future[Any]) -> None:
        self._running.discard(operation)
        if len(self._running) < AT_THE_RANKS:
            self.flush()


def _tell(
    answers: list[asyncio.Future[RequestOutput]], done: asyncio.Task[list[RequestOutput | PassFailed]]
) -> None:
    if done.cancelled():
        for answer in answers:
            answer.cancel()
        return
    error = done.exception()
    for number, answer in enumerate(answers):
        if answer.done():  # whoever asked has been cancelled
            continue
        outcome = error or done.result()[number]
        if isinstance(outcome, BaseException):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)
