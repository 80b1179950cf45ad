"""The one path that `forward` and `forward_backward` share: same microbatches, same loss, same bits.

Logprobs come out of the loss pass itself. A forward differs in `forward_only` alone, which Megatron's schedule
takes to mean: no backward call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from actors import device
from actors.packing import PackedRequest
from loss_hub import BatchInputs, CheckedRequest, evaluate


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Datums of one request, right-padded for the model and flat for the loss."""

    index: int
    """Its number in the request."""
    tokens_B_S: Tensor
    targets_B_S: Tensor
    """(B, S), or (B, S, K); padding holds token 0."""
    flat_N: Tensor
    """Where the N real positions stand in the flattened (B · S)."""
    batch: BatchInputs


@dataclass(frozen=True, slots=True)
class MicrobatchOutput:
    """What one microbatch gives back."""

    index: int
    logprobs: list[np.ndarray]
    """float32, one per datum of the microbatch in its order, shaped like the datum's targets."""
    metrics: dict[str, float]


def microbatches(request: PackedRequest, chosen: Sequence[int]) -> Iterator[Microbatch]:
    """The chosen microbatches of a request as tensors on this rank's device."""
    offsets = [0, *accumulate(request.lengths)]
    widths = [k or 1 for k in request.ks]
    wide = [0, *accumulate(n * k for n, k in zip(request.lengths, widths, strict=True))]
    like_targets = {spec.name for spec in request.loss.inputs if spec.like_targets}
    # The arrays may be read-only views of shared memory; torch wants memory of its own.
    tokens = torch.from_numpy(request.tokens.copy())
    flat = {name: torch.from_numpy(values.copy()) for name, values in request.inputs.items()}
    where = device.device()

    def inputs_of(i: int) -> dict[str, Tensor]:
        out = {}
        for name, values in flat.items():
            if name in like_targets:
                part = values[wide[i] : wide[i + 1]]
                out[name] = part if request.ks[i] is None else part.view(-1, widths[i])
            else:
                out[name] = values[offsets[i] : offsets[i + 1]]
        return out

    for index in chosen:
        datums = request.microbatches[index]
        batch = CheckedRequest(
            loss=request.loss,
            config=request.config,
            lengths=tuple(request.lengths[i] for i in datums),
            ks=tuple(request.ks[i] for i in datums),
            tensors=tuple(inputs_of(i) for i in datums),
        ).batch(range(len(datums)))
        S = max(batch.lengths)
        flat_N = torch.cat([torch.arange(row * S, row * S + n) for row, n in enumerate(batch.lengths)])
        tokens_B_S = torch.zeros(len(datums) * S, dtype=torch.int64)
        tokens_B_S[flat_N] = torch.cat([tokens[offsets[i] : offsets[i + 1]] for i in datums])
        targets_N = batch.targets_N
        targets_B_S = torch.zeros(len(datums) * S, *targets_N.shape[1:], dtype=torch.int64)
        targets_B_S[flat_N] = targets_N
        yield Microbatch(
            index=index,
            tokens_B_S=tokens_B_S.view(len(datums), S).to(where),
            targets_B_S=targets_B_S.view(len(datums), S, *targets_N.shape[1:]).to(where),
            flat_N=flat_N.to(where),
            batch=batch.to(where),
        )


def run(model: GPTModel, request: PackedRequest, chosen: Sequence[int]) -> list[MicrobatchOutput]:
    """Run the chosen microbatches in order; gradients accumulate unless the request is `forward_only`.

    Finalizes nothing: the model's configuration has a no-op there. Returns outputs on the last pipeline stage,
    an empty list elsewhere.
    """
    if not chosen:
        return []

    def loss_of(microbatch: Microbatch, logprobs_B_S: Tensor) -> tuple[Tensor, Tensor, MicrobatchOutput]:
        batch = microbatch.batch
        logprobs_N = logprobs_B_S.reshape(-1, *logprobs_B_S.shape[2:]).index_select(0, microbatch.flat_N)
        evaluation = evaluate(request.loss, logprobs_N, batch, request.config)
        output = MicrobatchOutput(
            index=microbatch.index,
            logprobs=[part.numpy() for part in batch.split(logprobs_N.detach().cpu())],
            metrics=evaluation.metrics,
        )
        tokens = torch.tensor(microbatch.flat_N.numel(), dtype=torch.int, device=logprobs_N.device)
        return evaluation.loss_sum, tokens, output

    def forward_step(data: Iterator[Microbatch], model: GPTModel) -> tuple[Tensor, Any]:
        microbatch = next(data)
        B, S = microbatch.tokens_B_S.shape
        positions_B_S = torch.arange(S, device=microbatch.tokens_B_S.device).expand(B, S)
        logprobs_B_S = model(microbatch.tokens_B_S, positions_B_S, None, labels=microbatch.targets_B_S)
        return logprobs_B_S, partial(loss_of, microbatch)

    grad = torch.no_grad() if request.forward_only else torch.enable_grad()
    with grad:
        outputs: list[MicrobatchOutput] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=microbatches(request, chosen),
            model=[model],
            num_microbatches=len(chosen),
            seq_length=max(request.lengths),
            micro_batch_size=1,
            forward_only=request.forward_only,
        )
    return outputs
