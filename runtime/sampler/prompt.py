"""One prompt, alone: its keys and values, the logits of what comes next, and whatever was asked about its tokens.

Prompts never share a pass, so what is said of one does not depend on its neighbours at all. Its tokens are scored at
temperature 1, a slice of positions at a time: whole logits of a long prompt would take gigabytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bus.events import PromptAltTokens, TargetLogprobs, TopLogprobs
from runtime.sampler import drawing, rows, tensors
from runtime.sampler.contract import EMPTY_LOGPROB, SampleRequest, Targets
from runtime.sampler.network import Network

SLICE_VALUES = 2**24
"""Logits computed at a time, in numbers."""


@dataclass
class Prompt:
    """What one pass over a prompt gave."""

    layers: rows.Layers
    next_logits_V: Tensor
    logprobs: list[float] | None = None
    top: TopLogprobs | None = None
    targets: TargetLogprobs | None = None
    alternatives: PromptAltTokens | None = None


@dataclass
class _Scores:
    """Filled slice by slice; position p is about prompt token p."""

    request: SampleRequest
    generator: torch.Generator
    logprobs: list[float] = field(init=False)
    top_ids: Tensor = field(init=False)
    top_logprobs: Tensor = field(init=False)
    target_logprobs: list[float] = field(init=False)
    alternatives: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        length, k = len(self.request.prompt), self.request.top_prompt_logprobs
        self.logprobs = [math.nan] * length
        self.top_ids = torch.zeros(length, k, dtype=torch.int64)
        self.top_logprobs = torch.full((length, k), EMPTY_LOGPROB)
        self.target_logprobs = [0.0] * (len(self.request.targets.ids) if self.request.targets else 0)


@torch.inference_mode()
def read(network: Network, request: SampleRequest) -> Prompt:
    """The adapter has been routed already."""
    ids = torch.tensor([request.prompt])
    cache = rows.empty()
    hidden = network.hidden(ids, torch.arange(ids.shape[1])[None], None, cache)
    found = Prompt(rows.layers_of(cache), network.logits(hidden[:, -1])[0])
    scores = _Scores(request, drawing.generator(request.seed, -1))
    first = _first_scored(request)
    size = max(1, SLICE_VALUES // network.vocab_size)
    for start in range(first, len(request.prompt), size):
        end = min(start + size, len(request.prompt))
        _score(scores, start, end, network.logits(hidden[:, start - 1 : end - 1])[0])
    if request.prompt_logprobs:
        found.logprobs = scores.logprobs
    if request.top_prompt_logprobs:
        found.top = tensors.top(scores.top_ids, scores.top_logprobs)
    if (targets := request.targets) is not None:
        found.targets = TargetLogprobs(
            logprobs=tensors.float32(scores.target_logprobs, _values_shape(targets)),
            shape=targets.shape,
            crow_indices=targets.crow_indices,
            col_indices=targets.col_indices,
        )
    if request.prompt_alt_tokens:
        found.alternatives = _alternatives(scores.alternatives, request.prompt_alt_tokens)
    return found


def _first_scored(request: SampleRequest) -> int:
    """The first position that anything was asked about; the prompt's length where nothing was."""
    if request.prompt_alt_tokens:
        return 1
    first = len(request.prompt)
    if request.prompt_logprobs or request.top_prompt_logprobs:
        first = _first_of_last_n(request)
    if (targets := request.targets) is not None:
        rows_of = _rows_of(targets)
        first = min([first, *(rows_of[cell] + 1 for cell, token in enumerate(targets.ids) if token >= 0)])
    return first


def _first_of_last_n(request: SampleRequest) -> int:
    last_n = request.prompt_logprobs_last_n
    return 1 if last_n is None else max(1, len(request.prompt) - last_n)


def _rows_of(targets: Targets) -> list[int]:
    """The row of each cell."""
    crow = targets.crow_indices
    if crow is None:
        return [cell // targets.shape[1] for cell in range(len(targets.ids))]
    return [row for row in range(len(crow) - 1) for _ in range(crow[row + 1] - crow[row])]


def _values_shape(targets: Targets) -> tuple[int, ...]:
    return targets.shape if targets.crow_indices is None else (len(targets.ids),)


def _score(scores: _Scores, start: int, end: int, logits_N_V: Tensor) -> None:
    """Logits that stand one token before each of the positions from `start` to `end`."""
    request = scores.request
    logprobs_N_V = drawing.logprobs(logits_N_V, 1.0)
    own = max(start, _first_of_last_n(request)) - start
    if own < end - start:
        if request.prompt_logprobs:
            ids = torch.tensor(request.prompt[start + own : end])
            scores.logprobs[start + own : end] = logprobs_N_V[own:].gather(1, ids[:, None])[:, 0].tolist()
        if k := request.top_prompt_logprobs:
            top = logprobs_N_V[own:].topk(k)
            scores.top_ids[start + own : end] = top.indices
            scores.top_logprobs[start + own : end] = top.values
    if request.targets is not None:
        _score_targets(scores, request.targets, start, end, logprobs_N_V)
    if request.prompt_alt_tokens:
        scores.alternatives.append(_drawn(scores, logits_N_V))


def _score_targets(scores: _Scores, targets: Targets, start: int, end: int, logprobs_N_V: Tensor) -> None:
    crow, width = targets.crow_indices, targets.shape[1]
    for position in range(start, end):
        row = position - 1
        cells = range(row * width, (row + 1) * width) if crow is None else range(crow[row], crow[row + 1])
        for cell in cells:
            if (token := targets.ids[cell]) >= 0:
                scores.target_logprobs[cell] = float(logprobs_N_V[position - start, token])


def _drawn(scores: _Scores, logits_N_V: Tensor) -> tuple[Tensor, Tensor]:
    request = scores.request
    logprobs_N_V = drawing.logprobs(logits_N_V, request.temperature)
    k = request.prompt_alt_tokens
    if request.temperature == 0.0:
        tokens = logprobs_N_V.argmax(-1, keepdim=True).expand(-1, k)
    else:
        tokens = torch.multinomial(logprobs_N_V.exp(), k, replacement=True, generator=scores.generator)
    return tokens, logprobs_N_V.gather(1, tokens)


def _alternatives(drawn: list[tuple[Tensor, Tensor]], k: int) -> PromptAltTokens:
    tokens = torch.cat([torch.zeros(0, k, dtype=torch.int64), *(tokens for tokens, _ in drawn)])
    logprobs = torch.cat([torch.zeros(0, k), *(values for _, values in drawn)])
    return PromptAltTokens(tokens=tensors.int32(tokens), logprobs=tensors.float32(logprobs))
