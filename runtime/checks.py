"""Everything about an operation that can be refused, refused before it reaches a rank. Pure.

What passes here cannot fail on the ranks for a reason of the user's. A refusal names the field, the value and what
would be right, and concerns its operation alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor as TorchTensor

from actors.contract import AdapterConfig, FullConfig, TenantConfig
from actors.models.spec import ModelSpec
from bus.events import AdamParams, Array, CreateModel, Datum, ForwardBackward, Tensor
from loss_hub import CheckedRequest, DatumInputs, InputError, check
from runtime.config import Settings

_DTYPES = {"float32": torch.float32, "int64": torch.int64, "int32": torch.int32}
_INTEGER_INPUTS = ("target_tokens",)


class Refusal(ValueError):
    """The user's mistake, made for the user to read."""

    def __init__(self, error: str, field: str | None) -> None:
        super().__init__(error)
        self.error = error
        self.field = field


@dataclass(frozen=True, slots=True)
class Batch:
    """A `forward_backward` that will run."""

    tokens: tuple[TorchTensor, ...]
    """Each datum's `model_input`, (N,), int64."""
    request: CheckedRequest


def training(op: CreateModel, settings: Settings) -> TenantConfig:
    """What a `create_model` asks to train: an adapter, or every parameter."""
    names = (settings.served_name, settings.model)
    if op.base_model not in names:
        raise Refusal(
            f"base_model {op.base_model!r} is not served here; this server has {settings.served_name!r}",
            "base_model",
        )
    if op.lora is None:
        if settings.dtype != "float32":
            raise Refusal(
                f"training every parameter needs a float32 base model, and this server's dtype is {settings.dtype}; "
                "ask for a LoRA adapter",
                "lora",
            )
        return FullConfig()
    if not 1 <= op.lora.rank <= settings.lora.max_rank:
        raise Refusal(
            f"lora.rank is {op.lora.rank}; it must be between 1 and {settings.lora.max_rank}", "lora.rank"
        )
    if not (op.lora.train_attn or op.lora.train_mlp or op.lora.train_unembed):
        raise Refusal(
            "lora trains nothing: at least one of train_attn, train_mlp, train_unembed must be true", "lora"
        )
    return AdapterConfig(
        rank=op.lora.rank,
        alpha=settings.lora.alpha,
        seed=op.lora.seed or 0,
        train_attn=op.lora.train_attn,
        train_mlp=op.lora.train_mlp,
        train_unembed=op.lora.train_unembed,
    )


def batch(op: ForwardBackward, spec: ModelSpec, settings: Settings) -> Batch:
    """The tensors of a `forward_backward`, checked against the model and the loss."""
    limit = settings.limits.max_datums_per_request
    if limit and len(op.data) > limit:
        raise Refusal(f"data holds {len(op.data)} datums; the limit is {limit} in one request", "data")
    longest = min(settings.limits.max_datum_tokens or spec.context_length, spec.context_length)
    tokens = tuple(_model_input(datum, i, spec, longest) for i, datum in enumerate(op.data))
    inputs = [
        DatumInputs(
            len(tokens[i]),
            {
                name: _tensor(array, torch.int64 if name in _INTEGER_INPUTS else torch.float32)
                for name, array in datum.loss_fn_inputs.items()
            },
        )
        for i, datum in enumerate(op.data)
    ]
    try:
        return Batch(tokens, check(op.loss.name, op.loss.config, inputs, vocab_size=spec.vocab_size))
    except InputError as error:
        raise Refusal(str(error), error.field) from None


def adam_params(adam: AdamParams) -> AdamParams:
    """The hyperparameters of a step, as torch's AdamW would take them."""
    rules = (
        ("learning_rate", lambda v: v >= 0, "0 or more"),
        ("beta1", lambda v: 0 <= v < 1, "at least 0 and below 1"),
        ("beta2", lambda v: 0 <= v < 1, "at least 0 and below 1"),
        ("eps", lambda v: v > 0, "above 0"),
        ("weight_decay", lambda v: v >= 0, "0 or more"),
        ("grad_clip_norm", lambda v: v >= 0, "0 (off) or more"),
    )
    for name, right, rule in rules:
        value = getattr(adam, name)
        if not math.isfinite(value) or not right(value):
            raise Refusal(f"adam_params.{name} is {value}; it must be {rule}", f"adam_params.{name}")
    return adam


def _model_input(datum: Datum, i: int, spec: ModelSpec, longest: int) -> TorchTensor:
    field = f"data[{i}].model_input"
    array = datum.model_input
    if isinstance(array, Tensor) and (array.dtype == "float32" or len(array.shape) != 1):
        raise Refusal(
            f"{field} is {array.dtype} of shape {tuple(array.shape)}; it must be token ids of shape (N,)",
            field,
        )
    if not isinstance(array, Tensor) and any(int(value) != value for value in array):
        raise Refusal(f"{field} holds numbers that are no token ids", field)
    tokens = _tensor(array, torch.int64).to(torch.int64)
    if not 1 <= len(tokens) <= longest:
        raise Refusal(f"{field} has {len(tokens)} tokens; it must have between 1 and {longest}", field)
    low, high = (int(bound) for bound in torch.aminmax(tokens))
    if low < 0 or high >= spec.vocab_size:
        wrong = low if low < 0 else high
        raise Refusal(
            f"{field} holds token id {wrong}; the vocabulary has {spec.vocab_size}, ids go from 0 to "
            f"{spec.vocab_size - 1}",
            field,
        )
    return tokens


def _tensor(array: Array, dtype: torch.dtype) -> TorchTensor:
    """The array on the CPU, in the dtype it was sent in; plain numbers in `dtype`."""
    if not isinstance(array, Tensor):
        return torch.tensor(_numbers(array), dtype=dtype)
    own = _DTYPES[array.dtype]
    if not isinstance(array.data, bytes):
        return torch.tensor(_numbers(array.data), dtype=own).reshape(array.shape)
    if not array.data:
        return torch.empty(array.shape, dtype=own)
    return torch.frombuffer(bytearray(array.data), dtype=own).reshape(array.shape)


def _numbers(values: Sequence[float | int]) -> list[float | int]:
    return list(values)
