"""The SDK's `asample` body as a request to a sampler, or a CodecError that names the field. Pure.

Everything that can be refused without the weights is refused here, before anything is queued.
"""

from __future__ import annotations

import itertools
from typing import Any, Literal

import msgspec

from bus.errors import CodecError
from bus.events import sample_request_id
from bus.tables import GroupRow, SamplerRow
from runtime.ingress.body import convert
from runtime.ingress.requests import SdkRequest
from runtime.sampler.contract import SampleRequest, Targets

MAX_SAMPLES = 4096
MAX_CELLS = 2**24
"""Numbers that one request may ask for about its prompt, and about one of its sequences."""
MAX_SEED = 2**63


class EncodedText(msgspec.Struct, frozen=True, tag="encoded_text", tag_field="type"):
    tokens: list[int]


class Image(msgspec.Struct, frozen=True, tag="image", tag_field="type"):
    pass


class ImageAsset(msgspec.Struct, frozen=True, tag="image_asset_pointer", tag_field="type"):
    pass


class Dmel(msgspec.Struct, frozen=True, tag="dmel", tag_field="type"):
    pass


class Prompt(SdkRequest, frozen=True):
    chunks: list[EncodedText | Image | ImageAsset | Dmel]


class SamplingParams(SdkRequest, frozen=True):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class TensorData(SdkRequest, frozen=True):
    data: list[int]
    dtype: Literal["int64"]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class AsampleRequest(SdkRequest, frozen=True):
    sampling_session_id: str
    seq_id: int
    prompt: Prompt
    sampling_params: SamplingParams
    num_samples: int = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None
    type: Literal["sample"] = "sample"


def sample_request(
    fields: dict[str, Any], tenant: str, sampler: SamplerRow, group: GroupRow
) -> SampleRequest:
    """Raises CodecError for what cannot be honoured."""
    asked = convert(fields, AsampleRequest)
    if asked.record_stability_info:
        raise CodecError(
            "record_stability_info is true, but this server has no stable_reinforce to record it for",
            "record_stability_info",
        )
    prompt = _tokens(asked.prompt, group)
    params = asked.sampling_params
    room = group.context_length - len(prompt)
    max_tokens = room if params.max_tokens is None else params.max_tokens
    if room < 1:
        raise _wrong("prompt", f"{len(prompt)} tokens", f"below the context of {group.context_length}")
    if not 1 <= max_tokens <= room:
        raise _wrong(
            "sampling_params.max_tokens",
            max_tokens,
            f"from 1 to {room}, what the prompt's {len(prompt)} tokens leave of the context of "
            f"{group.context_length}",
        )
    _check_params(params)
    last_n = asked.prompt_logprobs_last_n
    if last_n is not None and not asked.prompt_logprobs:
        raise CodecError("prompt_logprobs_last_n needs prompt_logprobs", "prompt_logprobs_last_n")
    if last_n is not None and not 1 <= last_n <= len(prompt) - 1:
        raise _wrong(
            "prompt_logprobs_last_n", last_n, f"from 1 to {len(prompt) - 1}, one less than the prompt"
        )
    if not 1 <= asked.num_samples <= MAX_SAMPLES:
        raise _wrong("num_samples", asked.num_samples, f"from 1 to {MAX_SAMPLES}")
    for name, width, length, limit in (
        ("topk_prompt_logprobs", asked.topk_prompt_logprobs, len(prompt), group.vocab_size),
        ("prompt_alt_tokens_k", asked.prompt_alt_tokens_k, len(prompt), MAX_CELLS),
        ("topk_sample_logprobs", asked.topk_sample_logprobs, max_tokens, group.vocab_size),
    ):
        most = min(limit, MAX_CELLS // length)
        if not 0 <= width <= most:
            raise _wrong(name, width, f"from 0 to {most}")
    return SampleRequest(
        request_id=sample_request_id(asked.sampling_session_id, asked.seq_id),
        tenant=tenant,
        sampling_session_id=asked.sampling_session_id,
        seq_id=asked.seq_id,
        prompt=prompt,
        max_tokens=max_tokens,
        url=sampler.url,
        num_samples=asked.num_samples,
        seed=params.seed,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        **_stops(params.stop),
        prompt_logprobs=bool(asked.prompt_logprobs),
        prompt_logprobs_last_n=last_n,
        top_prompt_logprobs=asked.topk_prompt_logprobs,
        top_sample_logprobs=asked.topk_sample_logprobs,
        targets=_targets(asked.target_prompt_logprobs, len(prompt), group.vocab_size),
        prompt_alt_tokens=asked.prompt_alt_tokens_k,
    )


def _tokens(prompt: Prompt, group: GroupRow) -> tuple[int, ...]:
    tokens: list[int] = []
    for number, chunk in enumerate(prompt.chunks):
        if not isinstance(chunk, EncodedText):
            kind = str(type(chunk).__struct_config__.tag)
            raise CodecError(
                f"prompt.chunks[{number}] is of type {kind!r}, but this server samples from text tokens only",
                f"prompt.chunks[{number}]",
            )
        tokens += chunk.tokens
    if not tokens:
        raise CodecError("prompt holds no token, but at least one is needed", "prompt")
    for extreme in (min(tokens), max(tokens)):
        if not 0 <= extreme < group.vocab_size:
            raise _wrong("prompt", f"token {extreme}", f"from 0 to {group.vocab_size - 1}", "holds")
    return tuple(tokens)


def _check_params(params: SamplingParams) -> None:
    if params.seed is not None and not -MAX_SEED <= params.seed < MAX_SEED:
        raise _wrong("sampling_params.seed", params.seed, "a number of 64 bits")
    if not 0 <= params.temperature < float("inf"):
        raise _wrong("sampling_params.temperature", params.temperature, "0 or a positive number")
    if params.top_k < -1:
        raise _wrong("sampling_params.top_k", params.top_k, "-1 for all tokens, or 1 and more")
    if params.top_k == 0:
        raise _wrong("sampling_params.top_k", 0, "-1 for all tokens, or 1 and more")
    if not 0 < params.top_p <= 1:
        raise _wrong("sampling_params.top_p", params.top_p, "above 0 and at most 1")


def _stops(stop: str | list[str | int] | None) -> dict[str, Any]:
    """An empty list stops nowhere; whatever else there is, EOS ends a sequence too."""
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    if "" in stops:
        raise CodecError(
            "sampling_params.stop holds an empty text, which would end everything", "sampling_params.stop"
        )
    return {
        "stop_at_eos": stop != [],
        "stop_tokens": tuple(one for one in stops if isinstance(one, int)),
        "stop_texts": tuple(one for one in stops if isinstance(one, str)),
    }


def _targets(tensor: TensorData | None, length: int, vocab_size: int) -> Targets | None:
    if tensor is None:
        return None
    field = "target_prompt_logprobs"
    shape, data = tensor.shape or [], tensor.data
    if len(shape) != 2 or shape[0] != length - 1 or shape[1] < 1:
        raise _wrong(
            f"{field}.shape", shape, f"[{length - 1}, K]: a row for each prompt token after the first"
        )
    crow, col = tensor.sparse_crow_indices, tensor.sparse_col_indices
    if (crow is None) != (col is None):
        raise CodecError(
            f"{field} has one of sparse_crow_indices and sparse_col_indices, but needs both", field
        )
    if crow is None or col is None:
        if len(data) != shape[0] * shape[1]:
            raise _wrong(
                f"{field}.data", f"{len(data)} numbers", f"{shape[0] * shape[1]} for shape {shape}", "has"
            )
    elif not _is_csr(crow, col, len(data), shape):
        raise CodecError(f"{field}'s CSR indices do not fit its shape {shape} and {len(data)} values", field)
    if not any(token >= 0 for token in data):
        raise CodecError(f"{field} names no token: at least one id has to be 0 or more", field)
    for extreme in (min(data), max(data)):
        if not -1 <= extreme < vocab_size:
            raise _wrong(field, extreme, f"from -1 to {vocab_size - 1}", "holds")
    return Targets(
        ids=tuple(data),
        shape=(shape[0], shape[1]),
        crow_indices=None if crow is None else tuple(crow),
        col_indices=None if col is None else tuple(col),
    )


def _is_csr(crow: list[int], col: list[int], count: int, shape: list[int]) -> bool:
    return (
        len(crow) == shape[0] + 1
        and crow[0] == 0
        and crow[-1] == count == len(col)
        and all(before <= after for before, after in itertools.pairwise(crow))
        and all(0 <= column < shape[1] for column in col)
    )


def _wrong(field: str, value: object, right: str, verb: str = "is") -> CodecError:
    return CodecError(f"{field} {verb} {value}; it must be {right}", field)
