"""Training equals transformers + PEFT + torch's AdamW on `tiny`, whose head is tied.

Step by step the reference gets our weights, because free-running Adam turns a rounding error in a gradient near
zero into a step of the other sign.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from actors.contract import AdapterConfig
from bus.events import AdamParams
from tests.support import dumps
from tests.support.adamw import TorchAdamW, difference
from tests.support.models import Model
from tests.support.reference import Reference, assert_gradients_agree, worst
from tests.support.requests import datums, packed

SEEDS = range(5)
STEPS = 5
RANK = 8
LENGTHS = (9, 14)
ADAM = (
    AdamParams(learning_rate=1e-3, eps=1e-12),
    AdamParams(learning_rate=1e-3, eps=1e-8, weight_decay=0.1),
    AdamParams(learning_rate=1e-3, eps=1e-12, grad_clip_norm=0.5, weight_decay=0.1),
    AdamParams(learning_rate=1e-3, eps=1e-8, grad_clip_norm=0.5),
)


@pytest.fixture(scope="module")
def reference(tiny_folder: Path) -> Reference:
    return Reference(tiny_folder, RANK)


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling"])
@pytest.mark.parametrize("random_b", [False, True], ids=["zero-B", "random-B"])
@pytest.mark.parametrize("seed", SEEDS)
def test_each_step_has_the_references_logprobs_gradient_and_weights(
    tiny_model: Callable[..., Model], reference: Reference, seed: int, random_b: bool, loss: str
) -> None:
    model = tiny_model(AdapterConfig(RANK, 32, seed), b_seed=seed if random_b else None)
    adam = ADAM[seed % len(ADAM)]
    exact = TorchAdamW(model.weights())
    plain = TorchAdamW(model.weights(), norm_dtype=torch.float32)
    for number in range(STEPS):
        tokens, inputs = datums(LENGTHS, loss=loss, seed=100 * seed + number)
        before = model.weights()
        reference.set_weights(before)
        logprobs, loss_sum = reference.accumulate(loss, tokens, inputs)

        result = model.call(packed(tokens, inputs, loss=loss))
        step = model.step(adam)

        assert worst(result.logprobs, logprobs) <= 1e-5
        assert result.metrics["loss:sum"] == pytest.approx(loss_sum, rel=1e-5, abs=1e-4)
        assert_gradients_agree(step.gradient, reference.gradient())
        assert step.report.grad_norm == pytest.approx(float(dumps.vector(step.gradient).norm()), rel=1e-12)

        # torch's AdamW on our gradients runs free over the five steps and stays on our weights.
        assert difference(exact.step(step.gradient, adam), step.after) <= 1e-9
        assert difference(exact.moment("exp_avg"), step.exp_avg) <= 1e-9
        if adam.grad_clip_norm > 0:
            # By torch's float32 norm the clipped gradient may be one rounding off, and a weight with it.
            plain.set_weights(before)
            gap = dumps.vector(plain.step(step.gradient, adam)) - dumps.vector(step.after)
            assert gap.square().mean().sqrt() <= 1e-9
            assert gap.abs().max() <= 1.5e-8


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling"])
@pytest.mark.parametrize("seed", SEEDS)
def test_five_steps_of_their_own_end_at_the_references_weights(
    tiny_model: Callable[..., Model], reference: Reference, seed: int, loss: str
) -> None:
    model = tiny_model(AdapterConfig(RANK, 32, seed))
    start = model.weights()
    reference.set_weights(start)
    optimizer = torch.optim.AdamW(
        reference.parameters.values(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )
    for number in range(STEPS):
        tokens, inputs = datums(LENGTHS, loss=loss, seed=7_000 + 100 * seed + number)
        reference.accumulate(loss, tokens, inputs)
        optimizer.step()
        optimizer.zero_grad()
        model.call(packed(tokens, inputs, loss=loss))
        step = model.step(learning_rate=1e-3, eps=1e-8)

    ours, theirs = step.after, reference.weights()
    assert dumps.relative_l2(dumps.vector(ours), dumps.vector(theirs)) <= 1e-3
    # A hardly moves from where it began: B and the way travelled say more than the weights do.
    for part in ("lora_A", "lora_B"):
        moved = {
            which: dumps.vector({n: t - start[n] for n, t in weights.items() if part in n})
            for which, weights in (("ours", ours), ("theirs", theirs))
        }
        assert moved["theirs"].norm() > 0.1
        assert dumps.relative_l2(moved["ours"], moved["theirs"]) <= 1e-2


def test_the_adapter_of_a_tied_head_leaves_the_embeddings_alone(
    tiny_model: Callable[..., Model], reference: Reference
) -> None:
    tokens, inputs = datums((5,), seed=3)
    fresh = tiny_model(AdapterConfig(RANK, 32, 1))
    before = fresh.call(packed(tokens, inputs, forward_only=True)).logprobs[0]

    head = tiny_model(AdapterConfig(RANK, 32, 1, train_attn=False, train_mlp=False), b_seed=1)
    weights = {name: torch.zeros_like(p) for name, p in reference.parameters.items()} | head.weights()
    reference.set_weights(weights)
    with torch.no_grad():
        hidden = reference.model.base_model.model.model(input_ids=tokens[0][None]).last_hidden_state[0]
        base = reference.model.base_model.model.lm_head.base_layer.weight
        a, b = (head.weights()[f"lm_head.lora_{part}.weight"] for part in "AB")
        logits = hidden @ (base + 32 / RANK * b @ a).T
        wanted = torch.log_softmax(logits, -1).gather(1, inputs[0].tensors["target_tokens"][:, None])[:, 0]
    after = head.call(packed(tokens, inputs, forward_only=True)).logprobs[0]
    assert worst([after], [wanted]) <= 1e-5
    assert abs(after - before).max() > 0.1
