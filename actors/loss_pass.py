"""The one path that `forward` and `forward_backward` share: same microbatches, same loss, same bits.

Logprobs come out of the loss pass itself. A forward differs in `forward_only` alone, which Megatron's schedule
takes to mean: no backward call. One pass may carry microbatches of several requests, each with a loss of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from actors import device
from actors.contract import MicrobatchOutput
from actors.models.build import LogprobModel
from actors.packing import PackedRequest, Slot
from actors.pipeline import communication
from loss_hub import BatchInputs, CheckedRequest, evaluate


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Datums of one request, right-padded for the model and flat for the loss."""

    slot: Slot
    tokens_B_S: Tensor
    targets_B_S: Tensor
    """(B, S), or (B, S, K); padding holds token 0."""
    flat_N: Tensor
    """Where the N real positions stand in the flattened (B · S)."""
    batch: BatchInputs | None
    """None where there is nothing but padding."""


class LossFailed(RuntimeError):
    """A loss could not be computed. Raised when the pass is over, so that no rank waits for another one."""


class _Arrays:
    """A request's flat arrays as tensors, cut into its datums."""

    def __init__(self, request: PackedRequest) -> None:
        self._request = request
        self._offsets = [0, *accumulate(request.lengths)]
        self._widths = [k or 1 for k in request.ks]
        self._wide = [0, *accumulate(n * k for n, k in zip(request.lengths, self._widths, strict=True))]
        self._like_targets = {spec.name for spec in request.loss.inputs if spec.like_targets}
        # The arrays may be read-only views of shared memory; torch wants memory of its own.
        self._tokens = torch.from_numpy(request.tokens.copy())
        self._flat = {name: torch.from_numpy(values.copy()) for name, values in request.inputs.items()}

    def tokens(self, i: int) -> Tensor:
        return self._tokens[self._offsets[i] : self._offsets[i + 1]]

    def inputs(self, i: int) -> dict[str, Tensor]:
        out = {}
        for name, values in self._flat.items():
            if name in self._like_targets:
                part = values[self._wide[i] : self._wide[i + 1]]
                out[name] = part if self._request.ks[i] is None else part.view(-1, self._widths[i])
            else:
                out[name] = values[self._offsets[i] : self._offsets[i + 1]]
        return out

    def microbatch(self, slot: Slot) -> Microbatch:
        request, where = self._request, device.device()
        assert slot.index is not None
        datums = request.microbatches[slot.index]
        batch = CheckedRequest(
            loss=request.loss,
            config=request.config,
            lengths=tuple(request.lengths[i] for i in datums),
            ks=tuple(request.ks[i] for i in datums),
            tensors=tuple(self.inputs(i) for i in datums),
        ).batch(range(len(datums)))
        B, S = slot.rows, slot.columns
        flat_N = torch.cat([torch.arange(row * S, row * S + n) for row, n in enumerate(batch.lengths)])
        tokens_B_S = torch.zeros(B * S, dtype=torch.int64)
        tokens_B_S[flat_N] = torch.cat([self.tokens(i) for i in datums])
        targets_N = batch.targets_N
        targets_B_S = torch.zeros(B * S, *targets_N.shape[1:], dtype=torch.int64)
        targets_B_S[flat_N] = targets_N
        return Microbatch(
            slot=slot,
            tokens_B_S=tokens_B_S.view(B, S).to(where),
            targets_B_S=targets_B_S.view(B, S, *targets_N.shape[1:]).to(where),
            flat_N=flat_N.to(where),
            batch=batch.to(where),
        )


def _padding(slot: Slot) -> Microbatch:
    zeros_B_S = torch.zeros(slot.rows, slot.columns, dtype=torch.int64, device=device.device())
    return Microbatch(slot, zeros_B_S, zeros_B_S, zeros_B_S.new_empty(0), None)


def microbatches(requests: Sequence[PackedRequest], slots: Sequence[Slot]) -> Iterator[Microbatch]:
    """The slots' microbatches as tensors on this rank's device."""
    arrays: dict[int, _Arrays] = {}
    for slot in slots:
        if slot.index is None:
            yield _padding(slot)
            continue
        if slot.request not in arrays:
            arrays = {slot.request: _Arrays(requests[slot.request])}
        yield arrays[slot.request].microbatch(slot)


def run(
    chunks: Sequence[LogprobModel], requests: Sequence[PackedRequest], slots: Sequence[Slot]
) -> list[list[MicrobatchOutput]]:
    """Run the slots in order; gradients accumulate unless the requests are `forward_only`.

    Finalizes nothing: the model's configuration has a no-op there. Returns outputs by request on ranks that hold the
    loss, and empty lists elsewhere. Raises LossFailed on those ranks, after the pass.
    """
    found: list[list[MicrobatchOutput]] = [[] for _ in requests]
    if not slots:
        return found
    failures: list[Exception] = []

    def evaluated(microbatch: Microbatch, logprobs_N: Tensor) -> tuple[Tensor, MicrobatchOutput | None]:
        batch, slot = microbatch.batch, microbatch.slot
        if batch is None or slot.index is None:
            return logprobs_N.sum(), None  # of no position: 0, and no gradient
        request = requests[slot.request]
        evaluation = evaluate(request.loss, logprobs_N, batch, request.config)
        parts = [part.numpy() for part in batch.split(logprobs_N.detach().cpu())]
        return evaluation.loss_sum, MicrobatchOutput(slot.index, parts, evaluation.metrics)

    def loss_of(microbatch: Microbatch, logprobs_B_S: Tensor) -> tuple[Tensor, Tensor, Any]:
        flat = logprobs_B_S.reshape(-1, *logprobs_B_S.shape[2:])
        logprobs_N = flat.index_select(0, microbatch.flat_N)
        output = None
        try:
            loss_sum, output = evaluated(microbatch, logprobs_N)
        except Exception as error:  # other ranks wait for this microbatch's gradient: raised below
            failures.append(error)
            loss_sum = flat[:0].sum()
        tokens = torch.tensor(microbatch.flat_N.numel(), dtype=torch.int, device=logprobs_N.device)
        return loss_sum, tokens, (microbatch.slot.request, output)

    def forward_step(data: Iterator[Microbatch], model: LogprobModel) -> tuple[Tensor, Any]:
        microbatch = next(data)
        model.runs_padding = microbatch.batch is None
        B, S = microbatch.tokens_B_S.shape
        positions_B_S = torch.arange(S, device=microbatch.tokens_B_S.device).expand(B, S)
        logprobs_B_S = model(microbatch.tokens_B_S, positions_B_S, None, labels=microbatch.targets_B_S)
        return logprobs_B_S, partial(loss_of, microbatch)

    forward_only = requests[0].forward_only
    config = chunks[0].config
    ways = config.tensor_model_parallel_size if config.sequence_parallel else 1
    shapes = [(slot.columns // ways, slot.rows, config.hidden_size) for slot in slots]
    data = [microbatches(requests, slots) for _ in chunks]
    grad = torch.no_grad() if forward_only else torch.enable_grad()
    with grad:
        outputs = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data if len(chunks) > 1 else data[0],
            model=list(chunks),
            num_microbatches=len(slots),
            seq_length=max(slot.columns for slot in slots),
            micro_batch_size=1,
            forward_only=forward_only,
            **communication(config, shapes),
        )
    if failures:
        raise LossFailed(str(failures[0])) from failures[0]
    if parallel_state.is_pipeline_last_stage():
        for number, output in outputs:
            if output is not None:
                found[number].append(output)
    return found
