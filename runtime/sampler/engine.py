"""The engine over transformers: continuous batching with a KV cache, on the processor.

Between two steps one waiting request's prompt is read, and its sequences join the batch of their network: whoever
runs is held up by one prompt at most. Requests start in the order in which they came. A request with a seed runs in
batches of its own, whose sizes depend on it alone, so that it gives the same bits whatever else runs.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Hashable
from pathlib import Path

import torch

from bus.events import Failed
from runtime.sampler import prompt
from runtime.sampler.batch import Batch
from runtime.sampler.contract import Finished, SampleRequest, SamplingRefused
from runtime.sampler.library import Library, Served
from runtime.sampler.sequence import Asked

log = logging.getLogger(__name__)


class TransformersEngine:
    """Runs `max_running` sequences at a time."""

    def __init__(self, base: Path, *, max_running: int, max_samplers: int) -> None:
        self.library = Library(base, max_samplers)
        self._max_running = max_running
        self._queue: deque[Asked] = deque()
        self._batches: dict[Hashable, Batch] = {}
        self._numbers = itertools.count()
        self._tokens = 0

    def weights(self, request: SampleRequest) -> Served:
        served = self.library.get(request.url)
        if request.stop_texts:
            self.library.check_decodes()
        return served

    def add(self, request: SampleRequest, weights: Served) -> None:
        network = weights.network
        if len(request.prompt) + request.max_tokens > network.context:
            raise SamplingRefused(
                f"the prompt's {len(request.prompt)} tokens and max_tokens {request.max_tokens} are more than the "
                f"context of {network.context}"
            )
        if (largest := max(request.prompt)) >= network.vocab_size:
            raise SamplingRefused(
                f"prompt holds token {largest}, but the vocabulary has {network.vocab_size}"
            )
        stop_tokens = frozenset(request.stop_tokens) | (
            self.library.eos_ids if request.stop_at_eos else frozenset()
        )
        self._queue.append(Asked(request, weights, stop_tokens, self.library.decode))

    def cancel(self, request_id: str) -> None:
        for batch in list(self._batches.values()):
            for asked in batch.requests():
                if asked.request.request_id == request_id:
                    batch.drop(asked)
        self._queue = deque(asked for asked in self._queue if asked.request.request_id != request_id)
        self._forget_empty()

    @property
    def running(self) -> int:
        return sum(batch.size for batch in self._batches.values())

    @property
    def waiting(self) -> int:
        return sum(asked.prompt is None for asked in self._queue)

    @property
    def idle(self) -> bool:
        return not self._queue and not self._batches

    @property
    def tokens(self) -> int:
        return self._tokens

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        finished = self._start_one()
        for batch in list(self._batches.values()):
            self._tokens += batch.size
            finished += [
                Finished(asked.request.request_id, asked.outcome()) for asked in batch.step() if asked.done
            ]
        self._forget_empty()
        return finished

    def _start_one(self) -> list[Finished]:
        """Let sequences of the first waiting request run, as many as there is room for."""
        room = self._max_running - self.running
        if not self._queue or room <= 0:
            return []
        asked = self._queue[0]
        seeded = asked.request.seed is not None
        count = min(asked.not_started, self._max_running if seeded else room)
        if count > room:
            return []
        network = asked.served.network
        if asked.prompt is None:
            network.route([asked.served.adapter])
            try:
                asked.prompt = prompt.read(network, asked.request)
            except RuntimeError as error:  # as without enough memory for this prompt
                log.exception("the prompt of %s could not be read", asked.request.request_id)
                self._queue.popleft()
                failed = Failed(error=f"the prompt could not be read: {error}", category="server")
                return [Finished(asked.request.request_id, failed)]
        started = asked.start(count)
        self._tokens += count
        key: Hashable = (network, next(self._numbers)) if seeded else network
        batch = self._batches.setdefault(key, Batch(network, fixed=seeded))
        batch.join(asked.prompt.layers, started)
        self._forget_empty()  # a batch that nothing joined, as all were done with their first token
        if not asked.not_started:
            self._queue.popleft()
            if asked.done:
                return [Finished(asked.request.request_id, asked.outcome())]
        return []

    def _forget_empty(self) -> None:
        self._batches = {key: batch for key, batch in self._batches.items() if batch.size}
