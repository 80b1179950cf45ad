"""From logits to a token. What is drawn depends on a row's logits and on its own generator, on nothing else.

Top-k and top-p choose among the tokens of the temperature-scaled distribution; logprobs are those of the whole one.
"""

from __future__ import annotations

import hashlib
import secrets

import torch
from torch import Tensor


def generator(seed: int | None, index: int) -> torch.Generator:
    """Of sample number `index` of a request: with a seed the same every time, without one always another."""
    made = torch.Generator()
    if seed is None:
        made.manual_seed(secrets.randbits(63))
    else:
        digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
        made.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return made


def logprobs(logits_N_V: Tensor, temperature: float) -> Tensor:
    """float32, (N, V). At temperature 0 those of temperature 1: of a certain token there is nothing to say."""
    scaled = logits_N_V.float()
    if temperature not in (0.0, 1.0):
        scaled = scaled / temperature
    return torch.log_softmax(scaled, dim=-1)


def draw(logprobs_V: Tensor, temperature: float, top_k: int, top_p: float, source: torch.Generator) -> int:
    """One token. `top_k` -1 and `top_p` 1 leave the distribution as it is."""
    if temperature == 0.0:
        return int(logprobs_V.argmax())
    probabilities_V = filtered(logprobs_V, top_k, top_p)
    return int(torch.multinomial(probabilities_V, 1, generator=source))


def filtered(logprobs_V: Tensor, top_k: int, top_p: float) -> Tensor:
    """Probabilities (V,), 0 outside of the `top_k` likeliest tokens and of the smallest set of tokens, likeliest
    first, that has `top_p` of what these have together. Not normalised.
    """
    probabilities_V = logprobs_V.exp()
    if 0 < top_k < len(logprobs_V):
        kept = logprobs_V.topk(top_k).indices
        probabilities_V = torch.zeros_like(probabilities_V).index_copy_(0, kept, probabilities_V[kept])
    if top_p < 1.0:
        falling_V, order_V = probabilities_V.sort(descending=True, stable=True)
        before_V = falling_V.double().cumsum(0) - falling_V
        dropped = order_V[before_V >= top_p * falling_V.double().sum()]
        probabilities_V = probabilities_V.index_fill(0, dropped[dropped != order_V[0]], 0.0)
    return probabilities_V
