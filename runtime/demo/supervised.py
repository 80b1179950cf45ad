"""Supervised training through the official SDK, two steps in flight."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import tinker
from tinker import types

from runtime.demo.records import Training
from runtime.demo.rot13 import Example

Done = Callable[[int, float], None]
"""Called with the number of finished steps and the loss of the last one."""


def train(
    client: tinker.TrainingClient,
    batches: Sequence[Sequence[Example]],
    held_out: Sequence[Example],
    *,
    learning_rate: float,
    done: Done,
) -> Training:
    """One step a batch: step k + 1 is sent before the result of step k is awaited."""
    before = score(client, held_out)
    adam = types.AdamParams(learning_rate=learning_rate)
    in_flight: deque[
        tuple[tinker.APIFuture[types.ForwardBackwardOutput], tinker.APIFuture[types.OptimStepResponse]]
    ]
    in_flight = deque()
    losses: list[float] = []

    def finish() -> None:
        call, step = in_flight.popleft()
        losses.append(_mean_loss(call.result(), batches[len(losses)]))
        step.result()
        done(len(losses), losses[-1])

    began = time.monotonic()
    for batch in batches:
        in_flight.append((client.forward_backward(data(batch), "cross_entropy"), client.optim_step(adam)))
        if len(in_flight) > 1:
            finish()
    while in_flight:
        finish()
    seconds = time.monotonic() - began
    return Training(
        losses=tuple(losses),
        before=before,
        after=score(client, held_out),
        tokens=sum(len(example.tokens) for batch in batches for example in batch),
        seconds=seconds,
    )


def score(client: tinker.TrainingClient, examples: Sequence[Example]) -> float:
    """Nats per trained token, without touching the gradient."""
    return _mean_loss(client.forward(data(examples), "cross_entropy").result(), examples)


def data(examples: Sequence[Example]) -> list[types.Datum]:
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(list(example.tokens)),
            loss_fn_inputs={"target_tokens": list(example.targets), "weights": list(example.weights)},
        )
        for example in examples
    ]


def _mean_loss(output: types.ForwardBackwardOutput, examples: Sequence[Example]) -> float:
    loss: float = output.metrics["loss:sum"]
    return loss / sum(sum(example.weights) for example in examples)
