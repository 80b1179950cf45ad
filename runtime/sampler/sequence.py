"""One sequence that is being generated, and the request that it belongs to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from bus.events import Sampled, SampledSequence
from runtime.sampler import drawing, stopping, tensors
from runtime.sampler.contract import SampleRequest
from runtime.sampler.library import Served
from runtime.sampler.prompt import Prompt
from runtime.sampler.stopping import Decode


@dataclass(eq=False)
class Asked:
    """A request on its way through the engine."""

    request: SampleRequest
    served: Served
    stop_tokens: frozenset[int]
    decode: Decode
    prompt: Prompt | None = None
    """Once it has been read."""
    sequences: list[Sequence] = field(default_factory=list)
    """Those that have been started."""

    @property
    def not_started(self) -> int:
        return self.request.num_samples - len(self.sequences)

    @property
    def done(self) -> bool:
        return not self.not_started and all(sequence.stop_reason for sequence in self.sequences)

    def start(self, count: int) -> list[Sequence]:
        """So many more sequences, each with its first token."""
        assert self.prompt is not None
        first = len(self.sequences)
        started = [
            Sequence(self, drawing.generator(self.request.seed, first + number)) for number in range(count)
        ]
        for sequence in started:
            sequence.take(self.prompt.next_logits_V)
        self.sequences += started
        return started

    def outcome(self) -> Sampled:
        assert self.prompt is not None
        return Sampled(
            sequences=tuple(sequence.result() for sequence in self.sequences),
            prompt_logprobs=None if self.prompt.logprobs is None else tensors.float32(self.prompt.logprobs),
            top_prompt_logprobs=self.prompt.top,
            target_prompt_logprobs=self.prompt.targets,
            prompt_alt_tokens=self.prompt.alternatives,
        )


@dataclass(eq=False)
class Sequence:
    asked: Asked
    generator: torch.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    stop_reason: Literal["stop", "length"] | None = None
    """None while it goes on."""

    def take(self, logits_V: Tensor) -> None:
        """Draw the next token."""
        request = self.asked.request
        logprobs_V = drawing.logprobs(logits_V, request.temperature)
        token = drawing.draw(logprobs_V, request.temperature, request.top_k, request.top_p, self.generator)
        self.tokens.append(token)
        self.logprobs.append(float(logprobs_V[token]))
        if k := request.top_sample_logprobs:
            top = logprobs_V.topk(k)
            self.top.append((top.indices, top.values))
        if stopping.stops(self.tokens, self.asked.stop_tokens, request.stop_texts, self.asked.decode):
            self.stop_reason = "stop"
        elif len(self.tokens) == request.max_tokens:
            self.stop_reason = "length"

    def result(self) -> SampledSequence:
        assert self.stop_reason is not None
        top = None
        if self.top:
            top = tensors.top(
                torch.stack([ids for ids, _ in self.top]), torch.stack([values for _, values in self.top])
            )
        return SampledSequence(
            tokens=tensors.int32(self.tokens),
            logprobs=tensors.float32(self.logprobs),
            stop_reason=self.stop_reason,
            top_logprobs=top,
        )
