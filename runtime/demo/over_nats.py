"""A whole small training as an event client: `bus.client` over NATS, msgpack, every step sent ahead."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from bus.client import LoraConfig, Model, connect, datum
from bus.events import Datum
from runtime.demo.by_hand import score_by_hand
from runtime.demo.records import ByHand, Training
from runtime.demo.rot13 import Example
from runtime.demo.server import Endpoints

Done = Callable[[int, float], None]


async def train(
    server: Endpoints,
    model_id: str,
    batches: Sequence[Sequence[Example]],
    held_out: Sequence[Example],
    *,
    learning_rate: float,
    rank: int,
    done: Done,
) -> tuple[Training, ByHand]:
    """Create the model, train it, score one example by hand, unload it."""
    async with await connect(server.nats, tenant=server.tenant, password=server.nats_password) as client:
        model = await client.create_model(model_id, base_model=server.base_model, lora=LoraConfig(rank=rank))
        before = await _score(model, held_out)
        began = time.monotonic()
        in_flight = []
        for batch in batches:
            call = await model.forward_backward(_data(batch))
            in_flight.append((batch, call, await model.optim_step(learning_rate=learning_rate)))
        losses = []
        for batch, call, step in in_flight:
            losses.append((await call).metrics["loss:sum"] / _counted(batch))
            await step
            done(len(losses), losses[-1])
        seconds = time.monotonic() - began
        after = await _score(model, held_out)
        tokens = sum(len(example.tokens) for batch in batches for example in batch)
        training = Training(tuple(losses), before, after, tokens, seconds)

        # The number is taken by another writer: this one goes on behind it.
        by_hand = await score_by_hand(server, model_id, model.next_seq_id, held_out[0])
        await client.attach(model_id, model.next_seq_id + 1).unload()
        return training, by_hand


async def _score(model: Model, examples: Sequence[Example]) -> float:
    scored = await (await model.forward_backward(_data(examples), forward_only=True))
    return scored.metrics["loss:sum"] / _counted(examples)


def _data(examples: Sequence[Example]) -> list[Datum]:
    return [datum(e.tokens, target_tokens=e.targets, weights=e.weights) for e in examples]


def _counted(examples: Sequence[Example]) -> float:
    return sum(sum(example.weights) for example in examples)
