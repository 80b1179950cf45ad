"""Datums from what people have at hand: lists, numpy arrays, torch tensors, anything with the buffer protocol."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any, TypeAlias

from bus.errors import CodecError
from bus.events import Datum, DType, Tensor
from bus.tensors import checked, pack

Numbers: TypeAlias = Any
"""A (nested) sequence of numbers, an object with the buffer protocol or `tolist()`, or a ready `Tensor`."""

_DTYPES: dict[str, DType] = {"target_tokens": "int64"}
"""Inputs that are not float32."""

_FORMATS: dict[DType, dict[str, int]] = {
    "float32": {"f": 4},
    "int64": {"q": 8, "l": 8},
    "int32": {"i": 4, "l": 4},
}


def datum(tokens: Numbers, **loss_fn_inputs: Numbers) -> Datum:
    """One training example; `tokens[i]` predicts `target_tokens[i]`.

    `target_tokens` become int64, other inputs float32, each (N,) or (N, K); a ready `Tensor` keeps its dtype. Raises
    CodecError for a ragged list, a fraction among token ids, and a number that does not fit.

    >>> datum([5, 6], target_tokens=[6, 7], weights=[0, 1]).loss_fn_inputs["weights"].shape
    (2,)
    """
    return Datum(
        model_input=tensor(tokens, "int32", "model_input"),
        loss_fn_inputs={
            name: tensor(value, _DTYPES.get(name, "float32"), f"loss_fn_inputs.{name}")
            for name, value in loss_fn_inputs.items()
        },
    )


def tensor(value: Numbers, dtype: DType, field: str) -> Tensor:
    """`value` as a tensor of `dtype`. Raises CodecError."""
    if isinstance(value, Tensor):
        return checked(value, field)
    view = _view(value)
    if view is not None:
        if _FORMATS[dtype].get(view.format.lstrip("@=<")) == view.itemsize:
            return Tensor(dtype=dtype, shape=tuple(view.shape or ()), data=view.tobytes())
        value = view.tolist()
    elif hasattr(value, "tolist"):
        value = value.tolist()
    numbers, shape = _flat(value, field)
    return Tensor(dtype=dtype, shape=shape, data=pack(numbers, dtype, field))


def _view(value: Numbers) -> memoryview | None:
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError):
        return None
    return view if view.format.lstrip("@=<") in set("bBhHiIlLqQfd") else None


def _flat(value: Numbers, field: str) -> tuple[Sequence[float], tuple[int, ...]]:
    """Numbers in row-major order, and their shape."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise CodecError(f"{field} is a {type(value).__name__}, but must be a sequence of numbers", field)
    if not value or not isinstance(value[0], Sequence):
        for i, number in enumerate(value):
            if not isinstance(number, Real):
                raise CodecError(f"{field}[{i}] is {number!r}, but must be a number", field)
        return value, (len(value),)
    rows = [_flat(row, f"{field}[{i}]") for i, row in enumerate(value)]
    for i, (_, shape) in enumerate(rows):
        if shape != rows[0][1]:
            raise CodecError(f"{field} is ragged: row 0 has shape {rows[0][1]}, row {i} {shape}", field)
    return [number for numbers, _ in rows for number in numbers], (len(rows), *rows[0][1])
