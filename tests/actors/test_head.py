"""Target logprobs against torch's log_softmax and gather in float64, values and gradients."""

from __future__ import annotations

import math

import pytest
import torch

from actors.head import target_logprobs

pytestmark = pytest.mark.usefixtures("one_rank")


def reference(logits_S_B_V: torch.Tensor, targets_B_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits that require a gradient, logprobs), both float64."""
    logits = logits_S_B_V.double().requires_grad_()
    wide = targets_B_S if targets_B_S.dim() == 3 else targets_B_S[..., None]
    logprobs = torch.log_softmax(logits.transpose(0, 1), dim=-1).gather(-1, wide)
    return logits, logprobs.reshape(targets_B_S.shape)


@pytest.mark.parametrize("shape", [(3, 5), (3, 5, 4), (1, 1), (2, 7, 1)], ids=str)
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_values_and_gradients_equal_those_of_log_softmax(shape: tuple[int, ...], scale: float) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    B, S, *_ = shape
    logits_S_B_V = scale * torch.randn(S, B, 50, generator=generator)
    targets = torch.randint(0, 50, shape, generator=generator)
    upstream = torch.randn(shape, generator=generator)

    ours = logits_S_B_V.clone().requires_grad_()
    found = target_logprobs(ours, targets)
    found.backward(upstream)
    theirs, wanted = reference(logits_S_B_V, targets)
    wanted.backward(upstream.double())

    assert found.dtype == torch.float32
    assert found.shape == targets.shape
    torch.testing.assert_close(found.double(), wanted.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-6)


def test_logits_far_from_zero_neither_overflow_nor_lose_digits() -> None:
    logits = torch.tensor([[[3e4, 3e4 - 1, -3e4]]])
    found = target_logprobs(logits, torch.tensor([[[0, 1, 2]]]))[0, 0]
    total = math.log1p(math.exp(-1))
    assert found.tolist() == pytest.approx([-total, -1 - total, -6e4 - total], rel=1e-6)


def test_equal_logits_share_the_probability() -> None:
    assert target_logprobs(torch.zeros(1, 1, 64), torch.tensor([[9]])).item() == pytest.approx(-math.log(64))


def test_the_gradient_of_a_position_sums_to_zero_over_the_vocabulary() -> None:
    logits = torch.randn(4, 2, 30, generator=torch.Generator().manual_seed(1)).requires_grad_()
    target_logprobs(logits, torch.randint(0, 30, (2, 4))).sum().backward()
    assert logits.grad.sum(-1).abs().max() < 1e-6


def test_a_token_ruled_out_by_a_logit_of_minus_infinity_takes_no_part() -> None:
    kept = torch.randn(3, 1, 9, generator=torch.Generator().manual_seed(2))
    ruled_out = torch.full((3, 1, 1), -math.inf)
    ours = torch.cat([kept, ruled_out], dim=-1).requires_grad_()
    targets = torch.tensor([[1, 2, 8]])
    found = target_logprobs(ours, targets)
    found.sum().backward()
    theirs, wanted = reference(kept, targets)
    wanted.sum().backward()
    torch.testing.assert_close(found.double(), wanted.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.grad[..., :9].double(), theirs.grad, rtol=1e-5, atol=1e-6)
    assert (ours.grad[..., 9] == 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_position_without_weight_has_no_gradient_whatever_its_logits(bad: float) -> None:
    logits = torch.randn(3, 1, 8, generator=torch.Generator().manual_seed(3))
    logits[1, 0, 5] = bad
    logits.requires_grad_()
    logprobs = target_logprobs(logits, torch.tensor([[1, 5, 3]]))
    assert not torch.isfinite(logprobs[0, 1])
    weight = torch.tensor([[1.0, 0.0, -2.0]])
    (torch.where(weight != 0, logprobs, 0.0) * weight).sum().backward()
    assert (logits.grad[1] == 0).all()
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[[0, 2]] != 0).all()


@pytest.mark.parametrize("garbage", [0.0, 1e30, math.nan, math.inf], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 7, 11])
def test_columns_that_pad_the_vocabulary_take_no_part(vocab_size: int, garbage: float) -> None:
    logits = torch.randn(5, 2, 12, generator=torch.Generator().manual_seed(4))
    logits[..., vocab_size:] = garbage
    targets = torch.randint(0, vocab_size, (2, 5, 3), generator=torch.Generator().manual_seed(5))
    ours = logits.clone().requires_grad_()
    found = target_logprobs(ours, targets, vocab_size)
    found.sum().backward()
    theirs, wanted = reference(logits[..., :vocab_size], targets)
    wanted.sum().backward()
    torch.testing.assert_close(found.double(), wanted.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.grad[..., :vocab_size].double(), theirs.grad, rtol=1e-5, atol=1e-6)
    assert (ours.grad[..., vocab_size:] == 0).all()


def test_a_vocabulary_that_fills_every_column_gives_the_bits_of_one_that_nobody_named() -> None:
    logits = torch.randn(6, 2, 40, generator=torch.Generator().manual_seed(6))
    targets = torch.randint(0, 40, (2, 6), generator=torch.Generator().manual_seed(7))
    named, unnamed = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    found, wanted = target_logprobs(named, targets, 40), target_logprobs(unnamed, targets)
    found.sum().backward()
    wanted.sum().backward()
    assert torch.equal(found, wanted)
    assert torch.equal(named.grad, unnamed.grad)


@pytest.mark.parametrize("vocab_size", [0, -1, 9])
def test_a_vocabulary_that_the_columns_cannot_hold_is_refused(vocab_size: int) -> None:
    with pytest.raises(ValueError, match=f"vocab_size is {vocab_size}; the head has 8 rows"):
        target_logprobs(torch.zeros(1, 1, 8), torch.tensor([[0]]), vocab_size)
