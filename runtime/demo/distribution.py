"""The model's whole next-token distribution, by the means of training alone.

`cross_entropy` takes K targets a position. With every token as a target and every weight 0, `forward` answers with
the logprob of every token and adds nothing to anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tinker
from tinker import types


def logprobs(client: tinker.TrainingClient, texts: Sequence[Sequence[int]], vocab: int) -> list[np.ndarray]:
    """For each text, float32 (N, vocab): what follows each of its N tokens. Meant for small vocabularies."""
    output = client.forward([_datum(tokens, vocab) for tokens in texts], "cross_entropy").result()
    return [record["logprobs"].to_numpy() for record in output.loss_fn_outputs]


def greedy(client: tinker.TrainingClient, tokens: Sequence[int], vocab: int) -> list[int]:
    """The most probable token after each of `tokens`."""
    best: list[int] = logprobs(client, [tokens], vocab)[0].argmax(axis=1).tolist()
    return best


def _datum(tokens: Sequence[int], vocab: int) -> types.Datum:
    shape = (len(tokens), vocab)
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens)),
        loss_fn_inputs={
            "target_tokens": np.broadcast_to(np.arange(vocab, dtype=np.int64), shape).copy(),
            "weights": np.zeros(shape, np.float32),
        },
    )
