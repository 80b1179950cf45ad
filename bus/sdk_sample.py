"""A sampling result as the SDK's `SampleResponse`. Bytes pass through unchanged."""

from __future__ import annotations

import struct
from typing import Any

from bus import wire
from bus.events import Sampled, TargetLogprobs, Tensor, TopLogprobs
from bus.tensors import checked


def from_sampled(sampled: Sampled) -> bytes:
    response = wire.SampleResponse()
    for sequence in sampled.sequences:
        message = response.sequences.add()
        message.stop_reason = wire.STOP_REASONS[sequence.stop_reason]
        message.tokens = _bytes(sequence.tokens)
        message.logprobs = _bytes(sequence.logprobs)
        if sequence.top_logprobs is not None:
            _top(message.topk_sampled_logprobs, sequence.top_logprobs)
    if sampled.prompt_logprobs is not None:
        response.prompt_logprobs = _bytes(sampled.prompt_logprobs)
    if sampled.top_prompt_logprobs is not None:
        _top(response.topk_prompt_logprobs, sampled.top_prompt_logprobs)
    if sampled.target_prompt_logprobs is not None:
        _targets(response.target_prompt_logprobs, sampled.target_prompt_logprobs)
    if sampled.prompt_alt_tokens is not None:
        _dense(response.prompt_alt_tokens.tokens, sampled.prompt_alt_tokens.tokens, wire.INT32)
        _dense(response.prompt_alt_tokens.logprobs, sampled.prompt_alt_tokens.logprobs, wire.FLOAT32)
    body: bytes = response.SerializeToString()
    return body


def _bytes(tensor: Tensor) -> bytes:
    data = checked(tensor, "tensor").data
    assert isinstance(data, bytes)
    return data


def _top(message: Any, top: TopLogprobs) -> None:
    message.length, message.k = top.token_ids.shape
    message.token_ids = _bytes(top.token_ids)
    message.logprobs = _bytes(top.logprobs)


def _dense(message: Any, tensor: Tensor, dtype: int) -> None:
    message.dense = _bytes(tensor)
    message.dtype = dtype
    message.shape.extend(tensor.shape)


def _targets(message: Any, targets: TargetLogprobs) -> None:
    message.dtype = wire.FLOAT32
    message.shape.extend(targets.shape)
    if targets.crow_indices is None or targets.col_indices is None:
        message.dense = _bytes(targets.logprobs)
        return
    csr = message.sparse_csr
    csr.values = _bytes(targets.logprobs)
    csr.crow_indices = struct.pack(f"<{len(targets.crow_indices)}q", *targets.crow_indices)
    csr.col_indices = struct.pack(f"<{len(targets.col_indices)}q", *targets.col_indices)
