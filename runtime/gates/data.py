"""The batches that gates send: random tokens of fixed seeds, small enough for any model and any context.

Token ids stay below 250, which every tokenizer has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from tinker import types

Array = np.ndarray
TOKEN_IDS = (1, 250)


@dataclass(frozen=True, slots=True)
class Example:
    """One datum before it is one."""

    tokens_N: Array
    targets_N: Array
    """int64, (N,) or (N, K)."""
    weights_N: Array
    """float32, shaped like the targets."""

    def scaled(self, factor: float) -> Example:
        return replace(self, weights_N=(self.weights_N * factor).astype(np.float32))

    def weighted(self, weights_N: Array) -> Example:
        return replace(self, weights_N=weights_N.astype(np.float32))


def examples(lengths: Sequence[int], seed: int) -> list[Example]:
    """Random tokens; weights of either sign, none of them near 0."""
    generator = np.random.default_rng(seed)
    found = []
    for n in lengths:
        tokens = generator.integers(*TOKEN_IDS, size=n + 1)
        weights = generator.uniform(0.5, 1.5, size=n) * generator.choice([1, 1, 1, -1], size=n)
        found.append(Example(tokens[:-1], tokens[1:], weights.astype(np.float32)))
    return found


def scaled(batch: Sequence[Example], factor: float) -> list[Example]:
    return [example.scaled(factor) for example in batch]


def supervised(batch: Sequence[Example]) -> list[types.Datum]:
    """For `cross_entropy`."""
    return [datum(e.tokens_N, target_tokens=e.targets_N, weights=e.weights_N) for e in batch]


def rollouts(
    batch: Sequence[Example], logprobs: Sequence[Array], advantages: Sequence[Array], loss: str = ""
) -> list[types.Datum]:
    """For the losses of policy gradients; for `gspo` every token is in its sequence's ratio."""
    return [
        datum(
            e.tokens_N,
            target_tokens=e.targets_N,
            logprobs=q.astype(np.float32),
            advantages=a.astype(np.float32),
            **({"sequence_ratio_mask": np.ones_like(a, np.float32)} if loss == "gspo" else {}),
        )
        for e, q, a in zip(batch, logprobs, advantages, strict=True)
    ]


def datum(tokens_N: Array, **inputs: Array) -> types.Datum:
    """As the SDK takes it; arrays are int64 or float32."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens_N.tolist()),
        loss_fn_inputs={
            name: types.TensorData.from_numpy(np.ascontiguousarray(values)) for name, values in inputs.items()
        },
    )
