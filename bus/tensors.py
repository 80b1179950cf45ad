"""Dense arrays in and out of bytes: lists of numbers, bfloat16, CSR. Standard library only.

Bytes are little-endian and row-major everywhere; values are moved as bit patterns, never through Python floats,
except where the sender wrote a list of numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import prod
from typing import Literal

from bus.errors import CodecError
from bus.events import ITEM_SIZE, Array, DType, Tensor

_STRUCT = {"float32": "f", "int64": "q", "int32": "i"}
_BITS: dict[int, Literal["I", "Q"]] = {4: "I", 8: "Q"}


def pack(numbers: Sequence[float], dtype: DType, field: str) -> bytes:
    """Numbers as bytes. Raises CodecError for a fraction in an integer tensor and for what does not fit."""
    if dtype != "float32":
        for i, number in enumerate(numbers):
            if not isinstance(number, int):
                if not float(number).is_integer():
                    raise CodecError(f"{field}[{i}] is {number}, but {dtype} holds whole numbers only", field)
                numbers = [int(n) if float(n).is_integer() else n for n in numbers]
                break
    try:
        return struct.pack(f"<{len(numbers)}{_STRUCT[dtype]}", *numbers)
    except (struct.error, OverflowError) as error:
        raise CodecError(f"{field} holds a number that does not fit {dtype}: {error}", field) from None


def unpack(tensor: Tensor) -> tuple[float, ...]:
    """The numbers of a tensor, flat in row-major order."""
    if not isinstance(tensor.data, bytes):
        return tensor.data
    return struct.unpack(
        f"<{len(tensor.data) // ITEM_SIZE[tensor.dtype]}{_STRUCT[tensor.dtype]}", tensor.data
    )


def checked(tensor: Tensor, field: str) -> Tensor:
    """The same tensor with `data` as bytes. Raises CodecError when dtype, shape and length disagree."""
    for size in tensor.shape:
        if size < 0:
            raise CodecError(f"{field}.shape {list(tensor.shape)} has a negative dimension", f"{field}.shape")
    count = prod(tensor.shape)
    data = tensor.data
    if not isinstance(data, bytes):
        if len(data) != count:
            raise CodecError(
                f"{field} has {len(data)} numbers, but shape {list(tensor.shape)} needs {count}", field
            )
        return Tensor(dtype=tensor.dtype, shape=tensor.shape, data=pack(data, tensor.dtype, field))
    if len(data) != count * ITEM_SIZE[tensor.dtype]:
        raise CodecError(
            f"{field} has {len(data)} bytes, but shape {list(tensor.shape)} of {tensor.dtype} needs "
            f"{count * ITEM_SIZE[tensor.dtype]}",
            field,
        )
    return tensor


def as_tensor(array: Array, dtype: DType, field: str) -> Tensor:
    """A plain list of numbers becomes a 1-D tensor of `dtype`; a tensor is checked and keeps its own dtype."""
    if isinstance(array, Tensor):
        return checked(array, field)
    return Tensor(dtype=dtype, shape=(len(array),), data=pack(array, dtype, field))


def bfloat16_to_float32(data: bytes, field: str) -> bytes:
    """Exact: a bfloat16 is the upper half of a float32."""
    if len(data) % 2:
        raise CodecError(f"{field} has {len(data)} bytes, which is no whole number of bfloat16 values", field)
    out = bytearray(2 * len(data))
    out[2::4] = data[0::2]
    out[3::4] = data[1::2]
    return bytes(out)


def _indices(data: bytes, field: str) -> tuple[int, ...]:
    if len(data) % 8:
        raise CodecError(f"{field} has {len(data)} bytes, which is no whole number of int64 values", field)
    return struct.unpack(f"<{len(data) // 8}q", data)


def densify(
    values: bytes, crow: bytes, col: bytes, shape: tuple[int, ...], dtype: DType, field: str, limit_bytes: int
) -> Tensor:
    """A CSR matrix as a dense tensor; positions it does not name become 0.

    Raises CodecError for anything torch's invariant checks would refuse: index lists whose lengths disagree with
    the shape, row starts that fall, columns that are out of range, unsorted or doubled within a row. `limit_bytes`
    bounds the dense size, which the sparse one does not.
    """
    if len(shape) != 2 or shape[0] < 0 or shape[1] < 0:
        raise CodecError(f"{field}.shape is {list(shape)}, but CSR needs [rows, columns]", f"{field}.shape")
    rows, columns = shape
    size = ITEM_SIZE[dtype]
    if rows * columns * size > limit_bytes:
        raise CodecError(
            f"{field} is {rows} x {columns} of {dtype}: {rows * columns * size} bytes when dense, and this request "
            f"has {limit_bytes} left",
            field,
        )
    row_starts = _indices(crow, f"{field}.sparse_csr.crow_indices")
    column_of = _indices(col, f"{field}.sparse_csr.col_indices")
    if len(values) != len(column_of) * size:
        raise CodecError(
            f"{field}.sparse_csr.values has {len(values)} bytes, but {len(column_of)} column indices of {dtype} "
            f"need {len(column_of) * size}",
            f"{field}.sparse_csr.values",
        )
    if len(row_starts) != rows + 1 or row_starts[0] != 0 or row_starts[-1] != len(column_of):
        raise CodecError(
            f"{field}.sparse_csr.crow_indices must have {rows + 1} entries from 0 to {len(column_of)}",
            f"{field}.sparse_csr.crow_indices",
        )
    out = bytearray(rows * columns * size)
    if not column_of:
        return Tensor(dtype=dtype, shape=shape, data=bytes(out))
    target = memoryview(out).cast(_BITS[size])
    source = memoryview(values).cast(_BITS[size])
    for row in range(rows):
        start, end = row_starts[row], row_starts[row + 1]
        if end < start or end > len(column_of):
            raise CodecError(
                f"{field}.sparse_csr.crow_indices falls from {start} to {end} at row {row}",
                f"{field}.sparse_csr.crow_indices",
            )
        previous = -1
        for k in range(start, end):
            column = column_of[k]
            if not previous < column < columns:
                raise CodecError(
                    f"{field}.sparse_csr.col_indices: column {column} of row {row} must be above {previous} and "
                    f"below {columns}",
                    f"{field}.sparse_csr.col_indices",
                )
            target[row * columns + column] = source[k]
            previous = column
    return Tensor(dtype=dtype, shape=shape, data=bytes(out))
