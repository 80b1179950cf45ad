"""Fake INT4 against the formula worked out in numpy's float64, the scale rounded to bf16 on its bits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.transforms.fake_int4 import FakeInt4, check_tp_alignment, matches, quantize

CONVENTIONS = ("rtn", "kimi")
FLOAT32 = np.finfo(np.float32)


def rounded_to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 to the nearest bf16 (its upper 16 bits), a tie to the even one; finite values below bf16's limit."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits & 0xFFFF0000).astype(np.uint32).view(np.float32)


def reference(weight: np.ndarray, convention: str, group_size: int = 32) -> np.ndarray:
    """Quantized (out, in) float32 weights, group by group in float64; a quotient rounds to float32 as in a GPU."""
    divisor, qmin = {"rtn": (7.5, -8), "kimi": (7.0, -7)}[convention]
    out = np.zeros(weight.shape, dtype=np.float64)
    for row, values in enumerate(weight.astype(np.float64)):
        for start in range(0, len(values), group_size):
            group = values[start : start + group_size]
            amax = np.abs(group).max()
            scale = float(rounded_to_bf16(np.array([amax / divisor], dtype=np.float32))[0])
            if scale == 0:
                continue
            q = np.clip(np.rint((group / scale).astype(np.float32)), qmin, 7)
            out[row, start : start + group_size] = q * scale
    with np.errstate(over="ignore"):
        return out.astype(np.float32)


def random_weight(rows: int, columns: int, seed: int, exponent: float = 0.0) -> np.ndarray:
    """Normal, each row on a scale of its own around 10^exponent, a tenth of it zeros."""
    rng = np.random.default_rng(seed)
    size = 10.0 ** (exponent + rng.uniform(-1, 1, (rows, 1)))
    values = rng.standard_normal((rows, columns)) * size * (rng.random((rows, columns)) > 0.1)
    return np.clip(values, FLOAT32.min, FLOAT32.max).astype(np.float32)


def test_a_group_worked_out_by_hand() -> None:
    weight = torch.tensor([[7.5, -7.5, 0.5, 1.5, 2.5, -0.49, 0.51, 3.0]])
    assert quantize(weight, "rtn").tolist() == [[7.0, -8.0, 0.0, 2.0, 2.0, 0.0, 1.0, 3.0]]
    weight = torch.tensor([[7.0, -7.0, 0.5, 1.5, 2.5, -0.49, 0.51, 3.0]])
    assert quantize(weight, "kimi").tolist() == [[7.0, -7.0, 0.0, 2.0, 2.0, 0.0, 1.0, 3.0]]


def test_the_scale_is_rounded_to_bf16_before_it_divides() -> None:
    """amax / 7 = 1 + 3/512 lies between the bf16 values 1 + 2/256 (even mantissa) and 1 + 1/256: a tie."""
    scale = 1 + 2 / 256
    weight = torch.tensor([[7 * (1 + 3 / 512), 1.0]])
    assert quantize(weight, "kimi").tolist() == [[7 * scale, scale]]


@pytest.mark.parametrize("convention", CONVENTIONS)
@settings(deadline=None, max_examples=150)
@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 100),
    group_size=st.sampled_from([1, 8, 32, 128]),
    seed=st.integers(0, 2**32 - 1),
    exponent=st.floats(-46, 38.4),
)
def test_any_weight_equals_the_reference(
    convention: str, rows: int, columns: int, group_size: int, seed: int, exponent: float
) -> None:
    """From subnormal to the largest, with groups cut short."""
    weight = random_weight(rows, columns, seed, exponent)
    found = quantize(torch.from_numpy(weight), convention, group_size)
    np.testing.assert_array_equal(found.numpy(), reference(weight, convention, group_size))


@pytest.mark.parametrize("convention", CONVENTIONS)
@settings(deadline=None, max_examples=150)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
def test_any_finite_numbers_equal_the_reference(convention: str, values: list[float]) -> None:
    weight = np.array([values], dtype=np.float32)
    found = quantize(torch.from_numpy(weight), convention)
    np.testing.assert_array_equal(found.numpy(), reference(weight, convention))


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_weight_of_fewer_bits_gives_the_reference_rounded_to_its_dtype(
    convention: str, dtype: torch.dtype
) -> None:
    weight = torch.from_numpy(random_weight(9, 80, seed=1)).to(dtype)
    wanted = torch.from_numpy(reference(weight.float().numpy(), convention)).to(dtype)
    found = quantize(weight, convention)
    assert found.dtype == dtype
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_group_of_zeros_stays_zero_beside_one_that_is_not(convention: str) -> None:
    weight = torch.zeros(2, 70)
    weight[0, 40] = -3.0
    found = quantize(weight, convention)
    assert torch.isfinite(found).all()
    assert found.nonzero().tolist() == [[0, 40]]


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("tiny", [1e-45, 5e-45, 2e-40], ids=str)
def test_weights_too_small_for_a_scale_become_zero_or_stay_subnormal_but_never_nan(
    convention: str, tiny: float
) -> None:
    weight = np.array([[tiny, -tiny, 0.0, tiny / 2]], dtype=np.float32)
    found = quantize(torch.from_numpy(weight), convention)
    assert torch.isfinite(found).all()
    np.testing.assert_array_equal(found.numpy(), reference(weight, convention))


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("columns", [1, 31, 33, 70])
def test_a_short_last_group_counts_as_padded_with_zeros(convention: str, columns: int) -> None:
    weight = torch.from_numpy(random_weight(3, columns, seed=2))
    padded = torch.nn.functional.pad(weight, (0, -columns % 32))
    found = quantize(weight, convention)
    assert found.shape == weight.shape
    assert torch.equal(found, quantize(padded, convention)[:, :columns])


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_stays_visible_in_its_group_and_in_no_other(
    convention: str, bad: float
) -> None:
    weight = torch.from_numpy(random_weight(2, 96, seed=3))
    clean = quantize(weight, convention)
    weight[1, 40] = bad
    found = quantize(weight, convention)
    assert found[1, 32:64].isnan().all()
    found[1, 32:64] = clean[1, 32:64]
    assert torch.equal(found, clean)


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_values_are_whole_multiples_of_one_bf16_scale_per_group_within_the_limits(convention: str) -> None:
    weight = torch.from_numpy(random_weight(50, 64, seed=4))
    divisor, qmin = (7.5, -8) if convention == "rtn" else (7.0, -7)
    amax = weight.view(50, 2, 32).abs().amax(-1).numpy()
    scale = rounded_to_bf16(amax / np.float32(divisor)).astype(np.float64)[..., None]
    q = quantize(weight, convention).double().view(50, 2, 32).numpy() / scale
    np.testing.assert_array_equal(q, np.rint(q))
    assert qmin <= q.min() < q.max() <= 7
    # Half a step everywhere, except where the largest positive weight is clamped at 7.
    assert (np.abs(q - weight.view(50, 2, 32).numpy() / scale) <= 0.5 + 0.04).all()


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**32 - 1), exponent=st.floats(-30, 30))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kimi_maps_what_it_gives_to_itself(dtype: torch.dtype, seed: int, exponent: float) -> None:
    once = quantize(torch.from_numpy(random_weight(4, 70, seed, exponent)).to(dtype), "kimi")
    assert torch.equal(quantize(once, "kimi"), once)


def test_quantizing_leaves_the_weight_itself_alone() -> None:
    weight = torch.from_numpy(random_weight(3, 64, seed=7)).requires_grad_()
    before = weight.detach().clone()
    found = quantize(weight, "kimi")
    assert not found.requires_grad
    found.zero_()
    assert torch.equal(weight, before)


@pytest.mark.parametrize("tp", [2, 4])
def test_shards_of_whole_groups_equal_the_shards_of_the_whole(tp: int) -> None:
    weight = torch.from_numpy(random_weight(3, 128 * tp // 4, seed=8))
    check_tp_alignment(weight.shape[1], tp, 32, "layer")
    parts = [quantize(part, "rtn") for part in weight.chunk(tp, dim=1)]
    assert torch.equal(torch.cat(parts, dim=1), quantize(weight, "rtn"))


@pytest.mark.parametrize(("in_features", "tp"), [(96, 1), (70, 1), (64, 2), (128, 4), (96, 3)])
def test_alignment_is_accepted_where_no_group_is_cut(in_features: int, tp: int) -> None:
    check_tp_alignment(in_features, tp, 32, "layer")


@pytest.mark.parametrize(
    ("in_features", "tp", "share"),
    [(96, 2, "48"), (32, 2, "16"), (64, 4, "16"), (65, 2, "32.5"), (72, 2, "36")],
)
def test_alignment_is_refused_with_the_layer_and_the_sizes(in_features: int, tp: int, share: str) -> None:
    with pytest.raises(ValueError, match="straddle") as refused:
        check_tp_alignment(in_features, tp, 32, "model.layers.3.mlp.experts.7.down_proj")
    for fact in (
        "model.layers.3.mlp.experts.7.down_proj",
        f"tp={tp}",
        f"{in_features} input",
        f"{share} a rank",
        "32",
    ):
        assert fact in str(refused.value)


@pytest.mark.parametrize(
    ("name", "quantized"),
    [
        ("model.layers.0.mlp.experts.0.gate_proj", True),
        ("model.layers.47.mlp.experts.127.down_proj", True),
        ("model.layers.0.mlp.gate", False),
        ("model.layers.0.mlp.shared_experts.up_proj", False),
        ("model.layers.0.mlp.shared_expert.up_proj", False),
        ("model.layers.0.mlp.down_proj", False),
        ("model.layers.0.self_attn.q_proj", False),
        ("lm_head", False),
    ],
)
def test_by_default_the_experts_of_moe_layers_are_quantized(name: str, quantized: bool) -> None:
    assert matches(FakeInt4("kimi"), name) == quantized


def test_any_of_the_patterns_is_enough_and_case_counts() -> None:
    config = FakeInt4("rtn", modules=("*.q_proj", "model.layers.[01].mlp.*"))
    assert matches(config, "model.layers.9.self_attn.q_proj")
    assert matches(config, "model.layers.1.mlp.up_proj")
    assert not matches(config, "model.layers.2.mlp.up_proj")
    assert not matches(config, "model.layers.9.self_attn.Q_PROJ")


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("convention", "int8", '"rtn" or "kimi"'),
        ("modules", (), "at least one pattern"),
        ("modules", "model.*", "a tuple"),
        ("modules", ("model.*", ""), "at least one pattern"),
        ("group_size", 0, "at least 1"),
        ("group_size", 32.0, "whole number"),
        ("group_size", True, "whole number"),
    ],
)
def test_a_wrong_setting_is_refused_with_field_value_and_what_is_allowed(
    field: str, value: object, allowed: str
) -> None:
    with pytest.raises(ValueError, match=f"fake_int4.{field} is") as refused:
        FakeInt4(**{"convention": "rtn", field: value})
    assert repr(value) in str(refused.value)
    assert allowed in str(refused.value)
