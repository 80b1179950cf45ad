"""The yardstick: the same model, adapter, data, threads and optimizer in a plain Megatron loop, nothing around it.

Run as a program of its own: `python -m runtime.bench.bare FOLDER THREADS WORKLOAD` prints figures as JSON, one line for
each packing it tried. The loop knows its batch beforehand, checks nothing, returns nothing to anybody.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from actors import engine
from actors import optimizer as adamw
from actors.contract import AdapterConfig, EngineConfig
from bus.events import AdamParams
from runtime.bench.timing import Figures, percentile
from runtime.bench.workload import LEARNING_RATE, RANK, SEED, Workload, batch

PACKINGS = (4, 8, 32)
"""Datums of one microbatch."""


def training_loop(
    opened: engine.Engine,
) -> tuple[Callable[[int, tuple[Tensor, ...]], None], Callable[[], None]]:
    """(accumulate a batch in microbatches of n datums, step)."""
    opened.create("bare", AdapterConfig(rank=RANK, alpha=32.0, seed=SEED))
    tenant = opened.tenants.activate("bare")
    model, ddp, optimizer = opened.base[0], tenant.ddps[0], tenant.optimizer
    schedule = get_forward_backward_func()

    def loss_of(weights: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
        loss = -(weights * logprobs).sum()
        return loss, torch.tensor(weights.numel(), dtype=torch.int), {"loss": loss.item()}

    def forward_step(data: Iterator[tuple[Tensor, Tensor, Tensor]], model: Any) -> tuple[Tensor, Any]:
        tokens, targets, weights = next(data)
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        return model(tokens, positions, None, labels=targets), partial(loss_of, weights)

    def accumulate(size: int, whole: tuple[Tensor, ...]) -> None:
        parts = list(zip(*(tensor.split(size) for tensor in whole), strict=True))
        with ddp.no_sync():
            schedule(
                forward_step_func=forward_step,
                data_iterator=iter(parts),
                model=[model],
                num_microbatches=len(parts),
                seq_length=whole[0].shape[1],
                micro_batch_size=size,
                forward_only=False,
            )

    def step() -> None:
        finalize_model_grads([ddp], None)
        optimizer.prepare_grads()
        norm = adamw.gradient_norm(optimizer, sharded=False)
        adamw.step(optimizer, AdamParams(learning_rate=LEARNING_RATE), norm)
        ddp.zero_grad_buffer()
        optimizer.zero_grad()

    return accumulate, step


def measure(folder: Path, threads: int, work: Workload) -> Iterator[Figures]:
    torch.set_num_threads(threads)
    with engine.opened(EngineConfig(folder), 0, HashStore()) as opened:
        accumulate, step = training_loop(opened)
        whole = batch(work.datums, work.tokens)
        one = batch(1, work.call_tokens)
        for size in PACKINGS:
            for _ in range(work.warm_up):
                accumulate(size, whole)
                step()
            started = time.perf_counter()
            for _ in range(work.steps):
                accumulate(size, whole)
                step()
            speed = work.steps * work.tokens_per_step / (time.perf_counter() - started)
            seconds = []
            for _ in range(work.calls):
                started = time.perf_counter()
                accumulate(1, one)
                seconds.append(time.perf_counter() - started)
            step()
            yield Figures(
                f"bare, {size} a microbatch",
                speed,
                percentile(seconds, 0.5) * 1e3,
                percentile(seconds, 0.99) * 1e3,
            )


if __name__ == "__main__":
    for figures in measure(Path(sys.argv[1]), int(sys.argv[2]), Workload(*map(int, sys.argv[3].split(",")))):
        sys.stdout.write(msgspec.json.encode(figures).decode() + "\n")
