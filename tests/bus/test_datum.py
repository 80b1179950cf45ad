from __future__ import annotations

import array
import struct
from typing import Any

import numpy as np
import pytest
import torch

from bus.client import datum
from bus.datum import tensor
from bus.errors import CodecError
from bus.events import Tensor


def test_lists_take_the_dtype_of_their_field() -> None:
    made = datum([5, 6], target_tokens=[6, 7], weights=[0, 1.5], advantages=(1, -1))
    assert made.model_input == Tensor(dtype="int32", shape=(2,), data=struct.pack("<2i", 5, 6))
    assert made.loss_fn_inputs == {
        "target_tokens": Tensor(dtype="int64", shape=(2,), data=struct.pack("<2q", 6, 7)),
        "weights": Tensor(dtype="float32", shape=(2,), data=struct.pack("<2f", 0, 1.5)),
        "advantages": Tensor(dtype="float32", shape=(2,), data=struct.pack("<2f", 1, -1)),
    }


@pytest.mark.parametrize(
    "value",
    [
        np.array([1, 2, 3], dtype="<i8"),
        np.array([1, 2, 3], dtype="<i4"),
        np.array([1, 2, 3], dtype=np.uint16),
        np.array([1.0, 2.0, 3.0]),
        np.array([1, 9, 2, 9, 3, 9])[::2],
        np.array([1, 2, 3], dtype=">i8"),
        torch.tensor([1, 2, 3]),
        torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16),
        array.array("q", [1, 2, 3]),
        array.array("d", [1, 2, 3]),
        range(1, 4),
        bytearray(b"\1\2\3"),
        (np.int64(1), np.int32(2), np.float32(3)),
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', getattr(value, 'typecode', ''))}",
)
def test_arrays_of_any_kind_become_the_same_tensor(value: Any) -> None:
    expected = struct.pack("<3q", 1, 2, 3)
    assert tensor(value, "int64", "x") == Tensor(dtype="int64", shape=(3,), data=expected)
    assert tensor(value, "float32", "x").data == struct.pack("<3f", 1, 2, 3)


def test_two_dimensions_stay_two() -> None:
    expected = Tensor(dtype="float32", shape=(2, 3), data=struct.pack("<6f", 1, 2, 3, 4, 5, 6))
    rows = [[1, 2, 3], [4, 5, 6]]
    assert tensor(rows, "float32", "x") == expected
    assert tensor(np.array(rows, dtype=np.float32), "float32", "x") == expected
    assert tensor(np.array(rows, dtype=np.float64), "float32", "x") == expected
    assert tensor(np.array(rows, dtype=np.float32).T.copy().T, "float32", "x") == expected
    assert tensor(torch.tensor(rows), "float32", "x") == expected


def test_a_ready_tensor_keeps_its_dtype() -> None:
    ready = Tensor(dtype="int32", shape=(1,), data=b"\1\0\0\0")
    assert datum([1], mask=ready).loss_fn_inputs["mask"] is ready


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ([[1, 2], [3]], r"weights is ragged: row 0 has shape \(2,\), row 1 \(1,\)"),
        ([1, "a"], r"weights\[1\] is 'a', but must be a number"),
        ([1, [2]], r"weights\[1\] is \[2\], but must be a number"),
        ("abc", "weights is a str, but must be a sequence of numbers"),
        (3, "weights is a int, but must be a sequence of numbers"),
        (None, "weights is a NoneType"),
        ({1, 2}, "weights is a set"),
        ([1e39], "does not fit float32"),
        ([[1], 2], r"weights\[1\] is a int"),
    ],
)
def test_what_is_no_array_is_named(value: Any, complaint: str) -> None:
    with pytest.raises(CodecError, match=complaint):
        tensor(value, "float32", "weights")


def test_a_fraction_among_token_ids_is_named() -> None:
    with pytest.raises(CodecError, match=r"loss_fn_inputs.target_tokens\[1\] is 2.5") as caught:
        datum([1, 2], target_tokens=[1, 2.5])
    assert caught.value.field == "loss_fn_inputs.target_tokens"
