"""Declaring a loss, and finding it."""

from __future__ import annotations

import math

import pytest
import torch

import loss_hub
from loss_hub import DatumInputs, UnknownLoss, check, evaluate, get, names, registry
from loss_hub.registry import LossTerms
from loss_hub.specs import ADVANTAGES, ROLLOUT_LOGPROBS, TARGETS, InputSpec

BOOST = InputSpec("boost", torch.float32, absent=2.0)


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_LOSSES", dict(registry._LOSSES))


def test_the_built_in_losses_are_there() -> None:
    assert set(names()) >= {"cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"}
    assert get("ppo").name == "ppo"


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownLoss, match="cispo, cross_entropy, dro, gspo, importance_sampling, ppo"):
        get("reinforce")


@pytest.mark.parametrize(
    ("name", "because"),
    [
        ("stable_reinforce", "it needs records of the sampler that this server does not keep; known are"),
        ("custom", "uploaded loss graphs are not run here; use forward_backward_custom"),
    ],
)
def test_losses_of_the_tinker_api_that_are_not_served_are_refused_with_the_reason(name, because) -> None:
    with pytest.raises(UnknownLoss) as caught:
        get(name)
    assert str(caught.value).startswith(f"loss.name: loss {name!r} is not served: {because}")
    assert "importance_sampling" in str(caught.value)


@pytest.mark.usefixtures("own_registry")
def test_a_loss_of_ones_own_is_checked_and_evaluated_like_the_built_in_ones() -> None:
    @loss_hub.loss("boosted", inputs=(TARGETS, BOOST))
    def boosted(logprobs_N, batch, config) -> LossTerms:
        return LossTerms(per_token=-batch.tensors["boost"] * logprobs_N)

    request = check("boosted", {}, [DatumInputs(2, {"target_tokens": torch.tensor([1, 2])})])
    lp_N = torch.tensor([-1.0, -0.5], requires_grad=True)
    evaluation = evaluate(request.loss, lp_N, request.batch([0]), request.config)
    assert evaluation.metrics == {"loss:sum": 3.0, "tokens:sum": 2.0, "loss_tokens:sum": 2.0}


@pytest.mark.usefixtures("own_registry")
def test_a_loss_sees_zeros_where_a_position_takes_no_part() -> None:
    seen = {}

    @loss_hub.loss("looking", inputs=(TARGETS, ROLLOUT_LOGPROBS, ADVANTAGES))
    def looking(logprobs_N, batch, config) -> LossTerms:
        seen.update(lp=logprobs_N.tolist(), q=batch.rollout_logprobs_N.tolist())
        return LossTerms(per_token=logprobs_N + 1)

    inputs = {"logprobs": torch.tensor([-math.inf, -2.0]), "advantages": torch.tensor([0.0, 1.0])}
    request = check("looking", {}, [DatumInputs(2, inputs | {"target_tokens": torch.tensor([1, 2])})])
    evaluation = evaluate(request.loss, torch.tensor([math.nan, -1.5]), request.batch([0]), request.config)
    assert seen == {"lp": [0.0, -1.5], "q": [0.0, -2.0]}
    assert evaluation.loss_sum.item() == -0.5


@pytest.mark.usefixtures("own_registry")
def test_a_name_is_registered_once_and_a_loss_scores_targets() -> None:
    with pytest.raises(ValueError, match="'ppo'"):
        loss_hub.loss("ppo", inputs=(TARGETS,))
    with pytest.raises(ValueError, match="target_tokens"):
        loss_hub.loss("targetless", inputs=(BOOST,))


def test_the_public_face_is_what_the_package_lists() -> None:
    for name in loss_hub.__all__:
        assert getattr(loss_hub, name) is not None
