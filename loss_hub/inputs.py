"""A request's loss inputs, checked before anything runs: what passes here cannot fail in a loss function.

Everything refused is an InputError that names the field, what was found and what would be right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loss_hub.batch import BatchInputs
from loss_hub.config import parse_config
from loss_hub.errors import InputError
from loss_hub.registry import Loss, get
from loss_hub.specs import TARGETS, InputSpec

_INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True, slots=True)
class DatumInputs:
    """One datum as it arrived."""

    length: int
    """Tokens of its `model_input`, at least 1."""
    tensors: dict[str, Tensor]
    """`loss_fn_inputs` by name, on the CPU, in whatever dtype they were sent."""


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request whose loss can be evaluated on any grouping of its datums."""

    loss: Loss
    config: Any
    """An instance of `loss.config`."""
    lengths: tuple[int, ...]
    """Tokens of each datum."""
    ks: tuple[int | None, ...]
    """Targets per position of each datum, None where its `target_tokens` is 1-D."""
    tensors: tuple[dict[str, Tensor], ...]
    """Per datum, every input the loss declares, in its dtype."""

    def batch(self, indices: Sequence[int]) -> BatchInputs:
        """The chosen datums, at least one, concatenated in the given order."""
        if not indices:
            raise ValueError("a batch holds at least one datum")
        ks = tuple(self.ks[i] for i in indices)
        widest = None if all(k is None for k in ks) else max(k or 1 for k in ks)
        return BatchInputs(
            lengths=tuple(self.lengths[i] for i in indices),
            ks=ks,
            tensors={
                spec.name: torch.cat([_widen(self.tensors[i][spec.name], spec, widest) for i in indices])
                for spec in self.loss.inputs
            },
        )


def check(
    loss_name: str,
    config: Mapping[str, float | str],
    data: Sequence[DatumInputs],
    *,
    vocab_size: int | None = None,
) -> CheckedRequest:
    """The request in canonical form, or InputError. `vocab_size` also bounds the target ids from above."""
    loss = get(loss_name)
    parsed = parse_config(loss.config, config)
    if not data:
        raise InputError("holds no datum; at least one is needed", "data")
    tensors = tuple(_check_datum(loss, i, datum, vocab_size) for i, datum in enumerate(data))
    return CheckedRequest(
        loss=loss,
        config=parsed,
        lengths=tuple(datum.length for datum in data),
        ks=tuple(_targets_per_position(datum[TARGETS.name]) for datum in tensors),
        tensors=tensors,
    )


def _check_datum(loss: Loss, i: int, datum: DatumInputs, vocab_size: int | None) -> dict[str, Tensor]:
    if datum.length < 1:
        raise InputError(f"holds {datum.length} tokens; a datum has at least one", f"data[{i}].model_input")
    known = ", ".join(spec.name for spec in loss.inputs)
    for name in datum.tensors:
        if loss.input(name) is None:
            raise InputError(f"unknown input; {loss.name} takes {known}", _path(i, name))

    shape: tuple[int, ...] = (datum.length,)
    checked: dict[str, Tensor] = {}
    for spec in sorted(loss.inputs, key=lambda spec: spec.name != TARGETS.name):  # targets give the shape
        tensor = datum.tensors.get(spec.name)
        wanted = shape if spec.like_targets else (datum.length,)
        if tensor is None:
            if spec.absent is None:
                raise InputError(f"is missing; {loss.name} takes {known}", _path(i, spec.name))
            checked[spec.name] = torch.full(wanted, spec.absent, dtype=spec.dtype)
            continue
        tensor = _check_dtype(tensor, spec, _path(i, spec.name))
        if spec.name == TARGETS.name:
            shape = _check_target_shape(tensor, spec, datum.length, loss.name, _path(i, spec.name))
            _check_token_ids(tensor, vocab_size, _path(i, spec.name))
        else:
            _check_shape(tensor, wanted, _path(i, spec.name))
        checked[spec.name] = tensor
    _check_finite(loss, i, checked)
    return checked


def _path(i: int, name: str) -> str:
    return f"data[{i}].loss_fn_inputs.{name}"


def _check_dtype(tensor: Tensor, spec: InputSpec, field: str) -> Tensor:
    allowed = _INTEGERS if spec.dtype == torch.int64 else (torch.float32, *_INTEGERS)
    if tensor.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise InputError(f"is {str(tensor.dtype).removeprefix('torch.')}; must be one of {names}", field)
    return tensor.to(spec.dtype)


def _check_target_shape(
    tensor: Tensor, spec: InputSpec, length: int, loss_name: str, field: str
) -> tuple[int, ...]:
    shape = tuple(tensor.shape)
    if len(shape) == 1 or (spec.like_targets and len(shape) == 2 and shape[1] > 0):
        _check_length(shape[0], length, field)
        return shape
    rule = "(N,) or (N, K) with K ≥ 1" if spec.like_targets else "(N,): it scores one target a position"
    raise InputError(f"has shape {shape}; {loss_name} takes {rule}", field)


def _check_shape(tensor: Tensor, wanted: tuple[int, ...], field: str) -> None:
    shape = tuple(tensor.shape)
    if len(shape) != len(wanted) or shape[1:] != wanted[1:]:
        raise InputError(f"has shape {shape}; must be {wanted}", field)
    _check_length(shape[0], wanted[0], field)


def _check_length(found: int, length: int, field: str) -> None:
    if found != length:
        raise InputError(f"has length {found}, model_input has {length}; they must be equal", field)


def _check_token_ids(tensor: Tensor, vocab_size: int | None, field: str) -> None:
    low, high = (int(bound) for bound in torch.aminmax(tensor))
    if low < 0:
        raise InputError(f"holds token id {low} at {_where(tensor == low)}; ids start at 0", field)
    if vocab_size is not None and high >= vocab_size:
        raise InputError(
            f"holds token id {high} at {_where(tensor == high)}; the vocabulary has {vocab_size}, "
            f"so the largest id is {vocab_size - 1}",
            field,
        )


def _check_finite(loss: Loss, i: int, tensors: dict[str, Tensor]) -> None:
    for spec in loss.inputs:
        tensor = tensors[spec.name]
        if not tensor.is_floating_point():
            continue
        wrong = ~torch.isfinite(tensor)
        rule = "must be a finite number"
        if names := [name for name in spec.finite_where if loss.input(name)]:
            wrong &= torch.stack([tensors[name] != 0 for name in names]).any(dim=0)
            rule += f" where {' or '.join(names)} is not 0"
        if wrong.any():
            value = float(tensor[wrong][0])
            raise InputError(f"is {value} at {_where(wrong)}; {rule}", _path(i, spec.name))


def _where(mask: Tensor) -> str:
    """The first True of `mask`, in words."""
    index = [int(axis) for axis in mask.nonzero()[0]]
    return f"position {index[0]}" if len(index) == 1 else f"position {index[0]}, target {index[1]}"


def _targets_per_position(targets: Tensor) -> int | None:
    return None if targets.dim() == 1 else targets.shape[1]


def _widen(tensor: Tensor, spec: InputSpec, k: int | None) -> Tensor:
    """`tensor` with `k` columns, new ones 0; None leaves it 1-D."""
    if k is None or not spec.like_targets:
        return tensor
    columns = tensor.unsqueeze(1) if tensor.dim() == 1 else tensor
    return torch.nn.functional.pad(columns, (0, k - columns.shape[1]))
