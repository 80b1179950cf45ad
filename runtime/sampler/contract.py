"""What is asked of a sampling engine, and what an engine is.

A request is checked before it gets here (`runtime/ingress/sample_request.py`); an engine may still refuse it with
SamplingRefused. Another engine, on a GPU, has to do what `Engine` says and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import msgspec

from bus.events import Outcome

W = TypeVar("W")

EMPTY_LOGPROB = -99999.0
"""Of a cell that holds no token, beside token id 0."""


class SamplingRefused(Exception):
    """The request cannot be served; `str()` says why."""

    def __init__(self, message: str, category: Literal["user", "server"] = "user") -> None:
        super().__init__(message)
        self.category = category


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids to score at prompt positions: row i is scored at position i + 1. -1 asks for nothing."""

    ids: tuple[int, ...]
    shape: tuple[int, int]
    crow_indices: tuple[int, ...] | None = None
    """With `col_indices`: CSR, and `ids` holds the listed cells alone."""
    col_indices: tuple[int, ...] | None = None


class SampleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One `asample`, every default filled in. As msgpack it is what an ingress sends to a sampler process."""

    request_id: str
    tenant: str
    sampling_session_id: str
    seq_id: int
    prompt: tuple[int, ...]
    """At least one token."""
    max_tokens: int
    """At least 1; the prompt and this fit into the context."""
    url: str | None = None
    """Of the weights' folder, a PEFT adapter or a whole model; None for the base model's."""
    num_samples: int = 1
    seed: int | None = None
    """With one, the same request gives the same bits again, whatever else runs."""
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_k: int = -1
    top_p: float = 1.0
    stop_at_eos: bool = True
    stop_tokens: tuple[int, ...] = ()
    stop_texts: tuple[str, ...] = ()
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    """Prompt logprobs, and the top ones, for so many last tokens alone."""
    top_prompt_logprobs: int = 0
    top_sample_logprobs: int = 0
    targets: Targets | None = None
    prompt_alt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that is done, or has failed."""

    request_id: str
    outcome: Outcome


class Engine(Protocol[W]):
    """Driven by one thread, except for `weights`; nothing in it waits, except for the processor."""

    def weights(self, request: SampleRequest) -> W:
        """Bring into memory what the request needs. May take long, and may be called in any thread.

        Raises SamplingRefused.
        """

    def add(self, request: SampleRequest, weights: W) -> None:
        """Take a request into the queue. Raises SamplingRefused."""

    def cancel(self, request_id: str) -> None:
        """Forget a request: no `Finished` follows. Nothing happens where there is none of this id."""

    def step(self) -> list[Finished]:
        """Go on by one token a sequence, and say what has come to its end."""

    @property
    def running(self) -> int:
        """Sequences in the batch."""

    @property
    def waiting(self) -> int:
        """Requests of which no token has been computed yet."""

    @property
    def idle(self) -> bool:
        """Whether there is nothing to go on with."""

    @property
    def tokens(self) -> int:
        """Tokens generated so far."""
