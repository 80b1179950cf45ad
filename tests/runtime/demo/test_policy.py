"""From a distribution to datums, and from metric sums to means."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.demo import policy
from runtime.demo.policy import Rollout
from runtime.demo.records import PolicyStep

PROMPTS = [b"abc", b"de"]


def test_tokens_are_sampled_from_each_prompts_own_distribution() -> None:
    probabilities = np.zeros((2, 320))
    probabilities[0, ord("Q")] = 1.0
    probabilities[1, ord("q")] = 1.0
    found = policy.sample(PROMPTS, probabilities, 2, np.random.default_rng(0))
    assert found == [
        Rollout((97, 98, 99), ord("Q"), 1.0),
        Rollout((97, 98, 99), ord("Q"), 1.0),
        Rollout((100, 101), ord("q"), 0.0),
        Rollout((100, 101), ord("q"), 0.0),
    ]


def test_advantages_add_up_to_nothing() -> None:
    assert policy.centred([1.0, 0.0, 0.0, 1.0]) == [0.5, -0.5, -0.5, 0.5]


def test_the_sampled_token_alone_has_a_logprob_and_an_advantage() -> None:
    (datum,) = policy.data([Rollout((97, 98, 99), 81, 1.0)], [-2.5], [0.75])
    assert datum.model_input.to_ints() == [97, 98, 99]
    inputs = {name: list(tensor.data) for name, tensor in datum.loss_fn_inputs.items()}
    assert inputs == {
        "target_tokens": [98, 99, 81],
        "logprobs": [0.0, 0.0, -2.5],
        "advantages": [0.0, 0.0, 0.75],
    }


def test_a_step_shows_means_over_sampled_tokens() -> None:
    sums = {
        "loss:sum": -8.0,
        "rollout_tokens:sum": 4.0,
        "rollout_gap_abs:sum": 2.0,
        "kl_k1:sum": 1.0,
        "kl_k2:sum": 0.5,
        "kl_k3:sum": 0.25,
    }
    assert policy.step_of(2, sums) == PolicyStep(2, loss=-2.0, gap=0.5, k1=0.25, k2=0.125, k3=0.0625)


def test_the_reward_is_the_mass_on_capitals() -> None:
    probabilities = np.zeros((2, 320))
    probabilities[0, ord("A")] = 0.25
    probabilities[0, ord("Z")] = 0.25
    probabilities[:, ord("a")] = 0.5
    assert policy._rewarded(probabilities) == pytest.approx(0.25)
