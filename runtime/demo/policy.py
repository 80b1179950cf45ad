"""A few importance_sampling steps through the SDK, and the gap between the policy that sampled and the one that trains.

The policy answers a word with one token and is rewarded for a capital letter. Several steps train on the same
rollouts: at the first the two policies are one and the gap is 0, exactly, since `forward` is the training forward;
then it grows, until new rollouts are sampled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tinker
from tinker import types

from runtime.demo import distribution
from runtime.demo.records import PolicyRun, PolicyStep

CAPITALS = range(ord("A"), ord("Z") + 1)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of it."""

    rollouts: int = 3
    """How often the policy is sampled anew."""
    steps: int = 3
    """On each batch of rollouts."""
    samples: int = 16
    """Of each prompt."""
    learning_rate: float = 1e-3
    vocab: int = 320
    """Of `tiny`."""
    seed: int = 7


@dataclass(frozen=True, slots=True)
class Rollout:
    """A prompt and the one token that was sampled after it."""

    prompt: tuple[int, ...]
    token: int
    reward: float


Done = Callable[[PolicyStep], None]


def train(
    client: tinker.TrainingClient, prompts: Sequence[Sequence[int]], plan: Plan, done: Done
) -> PolicyRun:
    draw = np.random.default_rng(plan.seed)
    adam = types.AdamParams(learning_rate=plan.learning_rate)
    steps: list[PolicyStep] = []
    tokens = 0
    began = time.monotonic()
    policy = next_token(client, prompts, plan.vocab)
    before = _rewarded(policy)
    for number in range(plan.rollouts):
        batch = sample(prompts, policy, plan.samples, draw)
        advantages = centred([rollout.reward for rollout in batch])
        scored = client.forward(data(batch, [0.0] * len(batch), advantages), "importance_sampling").result()
        measured = [float(record["logprobs"].data[-1]) for record in scored.loss_fn_outputs]
        final = data(batch, measured, advantages)
        in_flight = [
            (client.forward_backward(final, "importance_sampling"), client.optim_step(adam))
            for _ in range(plan.steps)
        ]
        for call, step in in_flight:
            steps.append(step_of(number, call.result().metrics))
            step.result()
            done(steps[-1])
        tokens += plan.steps * sum(len(rollout.prompt) for rollout in batch)
        policy = next_token(client, prompts, plan.vocab)
    return PolicyRun(tuple(steps), before, _rewarded(policy), tokens, time.monotonic() - began)


def next_token(client: tinker.TrainingClient, prompts: Sequence[Sequence[int]], vocab: int) -> np.ndarray:
    """float64 (prompts, vocab): the probability of each token after each prompt. Rows add up to 1."""
    rows = [logprobs[-1] for logprobs in distribution.logprobs(client, prompts, vocab)]
    weights = np.exp(np.stack(rows).astype(np.float64))
    return weights / weights.sum(axis=1, keepdims=True)


def sample(
    prompts: Sequence[Sequence[int]], policy: np.ndarray, samples: int, draw: np.random.Generator
) -> list[Rollout]:
    """`samples` tokens after every prompt, as the policy would write them."""
    return [
        Rollout(tuple(prompt), int(token), float(token in CAPITALS))
        for prompt, row in zip(prompts, policy, strict=True)
        for token in draw.choice(len(row), size=samples, p=row)
    ]


def centred(rewards: Sequence[float]) -> list[float]:
    """Advantages: what each reward is above the mean."""
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def data(
    batch: Sequence[Rollout], rollout_logprobs: Sequence[float], advantages: Sequence[float]
) -> list[types.Datum]:
    """Datums in which the sampled token alone counts: prompt positions carry logprob 0 and advantage 0."""
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(list(rollout.prompt)),
            loss_fn_inputs={
                "target_tokens": [*rollout.prompt[1:], rollout.token],
                "logprobs": [0.0] * (len(rollout.prompt) - 1) + [logprob],
                "advantages": [0.0] * (len(rollout.prompt) - 1) + [advantage],
            },
        )
        for rollout, logprob, advantage in zip(batch, rollout_logprobs, advantages, strict=True)
    ]


def step_of(rollouts: int, metrics: Mapping[str, float]) -> PolicyStep:
    """The means of a result's sums."""
    count = metrics["rollout_tokens:sum"]
    return PolicyStep(
        rollouts=rollouts,
        loss=metrics["loss:sum"] / count,
        gap=metrics["rollout_gap_abs:sum"] / count,
        k1=metrics["kl_k1:sum"] / count,
        k2=metrics["kl_k2:sum"] / count,
        k3=metrics["kl_k3:sum"] / count,
    )


def _rewarded(policy: np.ndarray) -> float:
    return float(policy[:, CAPITALS.start : CAPITALS.stop].sum(axis=1).mean())
