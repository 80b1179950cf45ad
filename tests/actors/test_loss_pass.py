"""What a pass gives back: each datum its own outputs, a plain sum as loss, and nothing from padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.group import RequestOutput
from actors.packing import PackingConfig
from loss_hub import DatumInputs
from tests.support import dumps, reference
from tests.support.models import Model, Step
from tests.support.requests import datums, packed, random_request

LENGTHS = (7, 3, 11, 2, 5)
NewModel = Callable[..., Model]
ROUNDING = 5e-6
"""A few float32 roundings of a logprob near −8; a matrix product's last bits depend on its size."""


@pytest.fixture(scope="module")
def transformers_model(small_folder: Path) -> torch.nn.Module:
    return reference.load(small_folder)


def run(model: Model, tokens: Sequence[torch.Tensor], inputs: Sequence[DatumInputs], **kwargs) -> Step:
    """One window of one call, and the step that ends it."""
    model.call(packed(tokens, inputs, **kwargs))
    return model.step()


@pytest.mark.parametrize("order", list(permutations(range(5)))[::17], ids=str)
def test_output_i_is_datum_is_in_any_order_of_lengths(small_model: NewModel, order: tuple[int, ...]) -> None:
    model = small_model(b_seed=1)
    tokens, inputs = datums(LENGTHS, seed=2)
    alone = [
        model.call(packed([t], [d], forward_only=True)).logprobs[0]
        for t, d in zip(tokens, inputs, strict=True)
    ]
    together = model.call(packed([tokens[i] for i in order], [inputs[i] for i in order], forward_only=True))
    assert len(together.logprobs) == 5
    for found, i in zip(together.logprobs, order, strict=True):
        assert found.shape == (LENGTHS[i],)
        assert np.abs(found - alone[i]).max() <= ROUNDING


def test_padding_adds_nothing_to_loss_or_gradient(small_model: NewModel) -> None:
    """Five datums padded to 11 in one microbatch, against five microbatches without padding."""
    tokens, inputs = datums(LENGTHS, seed=3)
    found: list[tuple[RequestOutput, torch.Tensor]] = []
    for config in (PackingConfig(), PackingConfig(max_datums_per_microbatch=1)):
        model = small_model(b_seed=1)
        request = packed(tokens, inputs, packing=config)
        output = model.call(request)
        found.append((output, dumps.vector(model.step().gradient)))
    (padded, with_padding), (bare, without) = found
    assert dumps.relative_l2(with_padding, without) <= 1e-6
    assert padded.metrics == pytest.approx(bare.metrics, abs=1e-5)
    assert padded.metrics["tokens:sum"] == bare.metrics["tokens:sum"] == sum(LENGTHS)


def test_the_server_shifts_nothing(small_model: NewModel, transformers_model: torch.nn.Module) -> None:
    """Input [10, 11, 12], target [11, 12, 13], weights [0, 1, 0] is −lp(12 | 10, 11)."""
    inputs = DatumInputs(
        3,
        {"target_tokens": torch.tensor([11, 12, 13]), "weights": torch.tensor([0.0, 1.0, 0.0])},
    )
    output = small_model().call(packed([torch.tensor([10, 11, 12])], [inputs]))
    with torch.no_grad():
        logits = transformers_model(input_ids=torch.tensor([[10, 11]])).logits[0, -1]
    wanted = -torch.log_softmax(logits, -1)[12].item()
    assert output.metrics["loss:sum"] == pytest.approx(wanted, abs=1e-5)


def test_targets_that_wait_for_their_turn_do_not_mix_datums_of_one_and_of_k_targets(
    small_model: NewModel,
) -> None:
    """A 1-D datum beside a (N, 3) one gets 1-D logprobs, equal to those it has alone."""
    model = small_model(b_seed=1)
    tokens, inputs = datums((4, 6), seed=11)
    wide = DatumInputs(6, {"target_tokens": torch.arange(18).view(6, 3)})
    mixed = model.call(packed(tokens, [inputs[0], wide], forward_only=True))
    alone = model.call(packed(tokens[:1], inputs[:1], forward_only=True))
    assert mixed.logprobs[0].shape == (4,)
    assert mixed.logprobs[1].shape == (6, 3)
    assert np.abs(mixed.logprobs[0] - alone.logprobs[0]).max() <= ROUNDING


def test_a_request_whose_microbatches_are_many_is_merged_in_order(small_model: NewModel) -> None:
    model = small_model(b_seed=1)
    one = model.call(random_request(LENGTHS, seed=12, forward_only=True))
    packing = PackingConfig(max_tokens_per_microbatch=12)
    many = model.call(random_request(LENGTHS, seed=12, packing=packing, forward_only=True))
    assert len(random_request(LENGTHS, seed=12, packing=packing).microbatches) == 4
    for found, wanted in zip(many.logprobs, one.logprobs, strict=True):
        assert np.abs(found - wanted).max() <= ROUNDING
    assert many.metrics == pytest.approx(one.metrics, abs=1e-5)


@pytest.mark.parametrize(
    "parts",
    [[(0, 1, 2, 3)], [(0,), (1,), (2,), (3,)], [(3, 0), (2, 1)], [(1,), (0, 2, 3)]],
    ids=str,
)
@pytest.mark.parametrize("budget", [1, 40, 4096])
def test_loss_and_gradient_are_sums_over_any_partition_of_the_datums(
    small_model: NewModel, parts: list[tuple[int, ...]], budget: int
) -> None:
    """Lengths 3, 17, 5, 30: no mean over tokens, datums, microbatches or calls."""
    lengths = (3, 17, 5, 30)
    tokens, inputs = datums(lengths, seed=4)
    whole = small_model(b_seed=1)
    output = whole.call(packed(tokens, inputs))
    by_hand = -sum(
        float(np.dot(lp.astype(np.float64), datum.tensors["weights"].double().numpy()))
        for lp, datum in zip(output.logprobs, inputs, strict=True)
    )
    assert output.metrics["loss:sum"] == pytest.approx(by_hand, abs=1e-5)

    model = small_model(b_seed=1)
    losses = [
        model.call(
            packed([tokens[i] for i in part], [inputs[i] for i in part], packing=PackingConfig(budget))
        ).metrics["loss:sum"]
        for part in parts
    ]
    assert sum(losses) == pytest.approx(by_hand, abs=1e-5)
    step = model.step()
    assert step.report.window_calls == len(parts)
    assert step.report.window_tokens == sum(lengths)
    assert dumps.relative_l2(dumps.vector(step.gradient), dumps.vector(whole.step().gradient)) <= 2e-6
