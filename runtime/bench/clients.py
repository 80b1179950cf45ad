"""The same work through the service: by the official SDK, and by an event client over NATS."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import torch

from bus import client as bus_client
from bus.events import Datum, LoraConfig, Tensor
from runtime.bench.timing import Figures, percentile
from runtime.bench.workload import LEARNING_RATE, RANK, SEED, Workload, batch

WAIT_S = 600


def through_sdk(url: str, api_key: str, base_model: str, work: Workload) -> Figures:
    """All steps sent without awaiting; then single calls, each awaited."""
    import tinker
    from tinker import types

    service = tinker.ServiceClient(base_url=url, api_key=api_key)
    client = service.create_lora_training_client(base_model=base_model, rank=RANK, seed=SEED).result(
        timeout=WAIT_S
    )

    def data(datums: int, tokens: int) -> list[types.Datum]:
        return [
            types.Datum(
                model_input=types.ModelInput.from_ints(inputs.tolist()),
                loss_fn_inputs={
                    "target_tokens": types.TensorData.from_torch(targets),
                    "weights": types.TensorData.from_torch(weights),
                },
            )
            for inputs, targets, weights in zip(*batch(datums, tokens), strict=True)
        ]

    adam = types.AdamParams(learning_rate=LEARNING_RATE)
    whole, one = data(work.datums, work.tokens), data(1, work.call_tokens)

    def train(steps: int) -> None:
        pending = []
        for _ in range(steps):
            pending.append(client.forward_backward(whole, "cross_entropy"))
            pending.append(client.optim_step(adam))
        for future in pending:
            future.result(timeout=WAIT_S)

    train(work.warm_up)
    started = time.perf_counter()
    train(work.steps)
    speed = work.steps * work.tokens_per_step / (time.perf_counter() - started)
    seconds = []
    for _ in range(work.calls):
        started = time.perf_counter()
        client.forward_backward(one, "cross_entropy").result(timeout=WAIT_S)
        seconds.append(time.perf_counter() - started)
    service.close("success").result()
    return Figures("SDK", speed, percentile(seconds, 0.5) * 1e3, percentile(seconds, 0.99) * 1e3)


def through_nats(url: str, tenant: str, password: str, base_model: str, work: Workload) -> Figures:
    """The same through the event client's library."""

    def data(datums: int, tokens: int) -> list[Datum]:
        return [
            Datum(
                model_input=_tensor(inputs),
                loss_fn_inputs={"target_tokens": _tensor(targets), "weights": _tensor(weights)},
            )
            for inputs, targets, weights in zip(*batch(datums, tokens), strict=True)
        ]

    async def run() -> Figures:
        async with await bus_client.connect(url, tenant=tenant, password=password) as client:
            lora = LoraConfig(rank=RANK, seed=SEED)
            name = f"bench-{time.time_ns()}"
            model = await client.create_model(name, base_model=base_model, lora=lora)
            whole, one = data(work.datums, work.tokens), data(1, work.call_tokens)

            async def train(steps: int) -> None:
                pending: list[bus_client.Pending[Any]] = []
                for _ in range(steps):
                    pending.append(await model.forward_backward(whole, loss="cross_entropy"))
                    pending.append(await model.optim_step(learning_rate=LEARNING_RATE))
                for call in pending:
                    await call.result(WAIT_S)

            await train(work.warm_up)
            started = time.perf_counter()
            await train(work.steps)
            speed = work.steps * work.tokens_per_step / (time.perf_counter() - started)
            seconds = []
            for _ in range(work.calls):
                started = time.perf_counter()
                await (await model.forward_backward(one, loss="cross_entropy")).result(WAIT_S)
                seconds.append(time.perf_counter() - started)
            await model.unload()
            return Figures("NATS", speed, percentile(seconds, 0.5) * 1e3, percentile(seconds, 0.99) * 1e3)

    return asyncio.run(run())


def _tensor(values: torch.Tensor) -> Tensor:
    dtype = "float32" if values.is_floating_point() else "int64"
    return Tensor(dtype=dtype, shape=tuple(values.shape), data=values.numpy().tobytes())  # type: ignore[arg-type]
