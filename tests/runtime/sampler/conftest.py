"""Engines in this process over the tiny model, and what transformers itself says of the same tokens."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bus.events import Sampled
from bus.events import Tensor as BusTensor
from bus.tensors import unpack
from runtime.sampler.contract import SampleRequest
from runtime.sampler.engine import TransformersEngine

PROMPT = tuple(b"to be, or not to be")
_NUMBERS = itertools.count()


def request(prompt: tuple[int, ...] = PROMPT, max_tokens: int = 8, **options: Any) -> SampleRequest:
    """One that no EOS ends, unless `options` say so."""
    number = next(_NUMBERS)
    return SampleRequest(
        request_id=f"r-{number}",
        tenant="default",
        sampling_session_id="s",
        seq_id=number,
        prompt=prompt,
        max_tokens=max_tokens,
        **{"stop_at_eos": False, **options},
    )


def finish(engine: TransformersEngine, *requests: SampleRequest) -> list[Sampled]:
    """All at once, to the end."""
    for one in requests:
        engine.add(one, engine.weights(one))
    found = run(engine)
    return [found[one.request_id] for one in requests]


def run(engine: TransformersEngine) -> dict[str, Sampled]:
    outcomes: dict[str, Sampled] = {}
    while not engine.idle:
        for finished in engine.step():
            assert isinstance(finished.outcome, Sampled), finished.outcome
            outcomes[finished.request_id] = finished.outcome
    return outcomes


def numbers(tensor: BusTensor | None) -> Tensor:
    assert tensor is not None
    return torch.tensor(unpack(tensor)).reshape(tensor.shape)


def tokens(sampled: Sampled, index: int = 0) -> list[int]:
    return [int(token) for token in unpack(sampled.sequences[index].tokens)]


@pytest.fixture(scope="session")
def engine(tiny_folder: Path) -> TransformersEngine:
    return TransformersEngine(tiny_folder, max_running=8, max_samplers=2)


@pytest.fixture(scope="session")
def model(tiny_folder: Path) -> Any:
    """transformers' own, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()


@torch.no_grad()
def plain_logprobs(model: Any, ids: list[int] | tuple[int, ...], temperature: float = 1.0) -> Tensor:
    """(N, V) of one full pass without a cache: row i is about what comes after token i."""
    return torch.log_softmax(model(torch.tensor([ids])).logits[0] / temperature, -1)


def plain_sampled(
    model: Any, prompt: tuple[int, ...], sampled: list[int], temperature: float = 1.0
) -> Tensor:
    """The logprobs of generated tokens."""
    logprobs_N_V = plain_logprobs(model, [*prompt, *sampled], temperature)
    at = torch.arange(len(prompt) - 1, len(prompt) + len(sampled) - 1)
    return logprobs_N_V[at, torch.tensor(sampled)]
