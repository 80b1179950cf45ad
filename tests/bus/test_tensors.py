from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bus.errors import CodecError
from bus.events import Tensor
from bus.tensors import as_tensor, bfloat16_to_float32, checked, densify, pack, unpack

LIMIT = 2**20


def floats(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def longs(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


def test_numbers_become_little_endian_bytes_and_come_back() -> None:
    assert pack([1, 2], "int32", "x") == b"\x01\0\0\0\x02\0\0\0"
    assert pack([-1], "int64", "x") == b"\xff" * 8
    assert unpack(Tensor(dtype="float32", shape=(2,), data=floats(0.5, -2))) == (0.5, -2.0)


def test_whole_floats_are_taken_as_integers_and_fractions_are_named() -> None:
    assert pack([1, 2.0], "int64", "target_tokens") == longs(1, 2)
    with pytest.raises(CodecError, match=r"target_tokens\[1\] is 2\.5") as caught:
        pack([1, 2.5], "int64", "target_tokens")
    assert caught.value.field == "target_tokens"


@pytest.mark.parametrize(("numbers", "dtype"), [([2**31], "int32"), ([2**63], "int64"), ([1e39], "float32")])
def test_a_number_that_does_not_fit_is_refused(numbers: list[float], dtype: str) -> None:
    with pytest.raises(CodecError, match="does not fit"):
        pack(numbers, dtype, "weights")  # type: ignore[arg-type]


def test_shape_and_length_must_agree() -> None:
    with pytest.raises(CodecError, match=r"weights has 8 bytes, but shape \[3\] of float32 needs 12"):
        checked(Tensor(dtype="float32", shape=(3,), data=bytes(8)), "weights")
    with pytest.raises(CodecError, match=r"has 2 numbers, but shape \[3\] needs 3"):
        checked(Tensor(dtype="float32", shape=(3,), data=(1, 2)), "weights")
    with pytest.raises(CodecError, match="negative dimension"):
        checked(Tensor(dtype="float32", shape=(-1, -2), data=bytes(8)), "weights")


def test_a_plain_list_takes_the_dtype_of_its_field() -> None:
    assert as_tensor((1, 2), "int64", "x") == Tensor(dtype="int64", shape=(2,), data=longs(1, 2))


def test_bfloat16_widens_exactly() -> None:
    numbers = torch.tensor([1.5, -0.0, 3e38, float("-inf"), 1 / 3], dtype=torch.bfloat16)
    raw = numbers.view(torch.int16).numpy().tobytes()
    assert bfloat16_to_float32(raw, "x") == numbers.float().numpy().tobytes()


@given(
    st.integers(0, 5).flatmap(
        lambda columns: st.lists(
            st.lists(st.sampled_from([0.0, 1.5, -2.0]), min_size=columns, max_size=columns), max_size=5
        ).map(lambda rows: (columns, rows))
    )
)
def test_csr_becomes_the_matrix_it_came_from(matrix: tuple[int, list[list[float]]]) -> None:
    columns, rows = matrix
    values = [x for row in rows for x in row if x]
    col = [j for row in rows for j, x in enumerate(row) if x]
    crow = [0]
    for row in rows:
        crow.append(crow[-1] + sum(1 for x in row if x))
    found = densify(floats(*values), longs(*crow), longs(*col), (len(rows), columns), "float32", "w", LIMIT)
    assert found.shape == (len(rows), columns)
    assert found.data == floats(*(x for row in rows for x in row))


@pytest.mark.parametrize(
    ("values", "crow", "col", "shape", "field"),
    [
        (floats(1), longs(0, 1), longs(3), (1, 3), "w.sparse_csr.col_indices"),
        (floats(1), longs(0, 1), longs(-1), (1, 3), "w.sparse_csr.col_indices"),
        (floats(1, 2), longs(0, 2), longs(1, 1), (1, 3), "w.sparse_csr.col_indices"),
        (floats(1, 2), longs(0, 2), longs(2, 1), (1, 3), "w.sparse_csr.col_indices"),
        (floats(1), longs(0, 1), longs(0), (2, 3), "w.sparse_csr.crow_indices"),
        (floats(1), longs(1, 1), longs(0), (1, 3), "w.sparse_csr.crow_indices"),
        (floats(1), longs(0, 0), longs(0), (1, 3), "w.sparse_csr.crow_indices"),
        (floats(1), longs(0, 2, 1), longs(0), (2, 3), "w.sparse_csr.crow_indices"),
        (floats(1), longs(0, -1, 1), longs(0), (2, 3), "w.sparse_csr.crow_indices"),
        (floats(1), b"", longs(0), (0, 3), "w.sparse_csr.crow_indices"),
        (floats(1), longs(0, 1) + b"\0", longs(0), (1, 3), "w.sparse_csr.crow_indices"),
        (floats(1), longs(0, 1), b"\0", (1, 3), "w.sparse_csr.col_indices"),
        (floats(1, 2), longs(0, 1), longs(0), (1, 3), "w.sparse_csr.values"),
        (floats(1)[:3], longs(0, 1), longs(0), (1, 3), "w.sparse_csr.values"),
        (floats(1), longs(0, 1), longs(0), (3,), "w.shape"),
        (floats(1), longs(0, 1), longs(0), (1, -3), "w.shape"),
    ],
)
def test_malformed_csr_is_refused_by_field(
    values: bytes, crow: bytes, col: bytes, shape: tuple[int, ...], field: str
) -> None:
    with pytest.raises(CodecError) as caught:
        densify(values, crow, col, shape, "float32", "w", LIMIT)
    assert caught.value.field == field


def test_a_few_bytes_cannot_ask_for_a_huge_matrix() -> None:
    with pytest.raises(CodecError, match="4000000000000 bytes when dense"):
        densify(b"", longs(0, 0), b"", (1, 10**12), "float32", "w", LIMIT)
