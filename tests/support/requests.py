"""Requests made of random tokens, for tests of the actors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from actors.packing import PackedRequest, PackingConfig, pack
from loss_hub import DatumInputs, check

VOCAB = 256


def random_tokens(lengths: Sequence[int], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n + 1,), generator=generator) for n in lengths]


def datums(
    lengths: Sequence[int], *, loss: str = "cross_entropy", seed: int = 0, weight: float | None = None
) -> tuple[list[torch.Tensor], list[DatumInputs]]:
    """Model inputs and loss inputs; weights and advantages are random of either sign unless `weight` is given."""
    generator = torch.Generator().manual_seed(seed + 1_000_003)
    tokens, inputs = [], []
    for full in random_tokens(lengths, seed):
        n = len(full) - 1
        noise = torch.randn(n, generator=generator) if weight is None else torch.full((n,), weight)
        tensors = {"target_tokens": full[1:]}
        if loss == "cross_entropy":
            tensors["weights"] = noise
        else:
            tensors["advantages"] = noise
            tensors["logprobs"] = -5 + torch.randn(n, generator=generator) * 0.1
        if loss == "gspo":
            tensors["sequence_ratio_mask"] = torch.ones(n)
        tokens.append(full[:-1])
        inputs.append(DatumInputs(n, tensors))
    return tokens, inputs


def packed(
    tokens: Sequence[torch.Tensor],
    inputs: Sequence[DatumInputs],
    *,
    loss: str = "cross_entropy",
    config: dict[str, float | str] | None = None,
    packing: PackingConfig | None = None,
    forward_only: bool = False,
) -> PackedRequest:
    checked = check(loss, config or {}, list(inputs), vocab_size=320)
    return pack(list(tokens), checked, packing or PackingConfig(), forward_only=forward_only)


def random_request(
    lengths: Sequence[int],
    *,
    loss: str = "cross_entropy",
    seed: int = 0,
    packing: PackingConfig | None = None,
    forward_only: bool = False,
) -> PackedRequest:
    tokens, inputs = datums(lengths, loss=loss, seed=seed)
    return packed(tokens, inputs, loss=loss, packing=packing, forward_only=forward_only)
