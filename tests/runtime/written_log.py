"""A log with two models, as the service would have written it; every test's values are worked out from it.

| position | tenant | operation | result | ledger |
|---|---|---|---|---|
| 1 | demo | run:0#0 create_model, rank 4 | model_created | done |
| 2 | other | b#0 create_model, full, as JSON | model_created | |
| 3 | demo | run:0#1 forward_backward, datums of 3 and 2 tokens | forward_backward_done | done |
| 4 | demo | run:0#2 optim_step | | |
| 5 | demo | run:0#3 refused | failed | failed, horizon 5 |
| 6 | other | b#end unload_model | model_unloaded | |

The table of models has run:0 (live) and c, which was announced and has no operation.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from bus.codec import JSON, MSGPACK, encode
from bus.connection import Bus, connect
from bus.datum import datum, tensor
from bus.embedded import EmbeddedBroker
from bus.events import (
    AdamParams,
    CreateModel,
    Failed,
    ForwardBackward,
    ForwardBackwardDone,
    LoraConfig,
    LossChoice,
    ModelCreated,
    ModelUnloaded,
    Op,
    OptimStep,
    Outcome,
    Refused,
    Result,
    UnloadModel,
    request_id,
)
from bus.ledger import Ledger
from bus.log import OpsLog, entry
from bus.results import Results
from bus.streams import ensure_streams
from bus.tables import ModelRow, Tables
from runtime.service import GROUP

CREATE = CreateModel(base_model="tiny", lora=LoraConfig(rank=4))
CREATE_FULL = CreateModel(base_model="small")
PASS = ForwardBackward(
    data=(
        datum([5, 6, 7], target_tokens=[6, 7, 8], weights=[1, 1, 0.5]),
        datum([5, 6], target_tokens=[6, 7], weights=[0, 1]),
    ),
    loss=LossChoice(name="cross_entropy"),
)
STEP = OptimStep(adam_params=AdamParams(learning_rate=1e-3))
REFUSED = Refused(error="no such loss", field="loss.name", verb="forward_backward")

DONE = ForwardBackwardDone(
    loss_fn_outputs=(
        {"logprobs": tensor([-1.0, -2.0, -3.0], "float32", "logprobs")},
        {"logprobs": tensor([-1.0, -2.0], "float32", "logprobs")},
    ),
    metrics={"loss:sum": 4.5, "tokens:sum": 5.0, "gap:max": float("inf")},
)
FAILED = Failed(error="no such loss", category="user", field="loss.name")


@contextlib.asynccontextmanager
async def server(broker: EmbeddedBroker) -> AsyncIterator[Bus]:
    """A server's connection, with the streams in place."""
    async with await connect(broker.url, broker.credentials, name="test") as bus:
        await ensure_streams(bus)
        yield bus


async def append(
    bus: Bus, tenant: str, model_id: str, seq_id: int | None, op: Op, content_type: str = MSGPACK
) -> None:
    body = encode(op, content_type)
    verb = str(op.__struct_config__.tag)
    await OpsLog(bus, GROUP).append(entry(tenant, model_id, seq_id, verb, body, content_type))


async def answer(bus: Bus, tenant: str, model_id: str, seq_id: int | None, outcome: Outcome) -> None:
    name = request_id(model_id, seq_id)
    await Results(bus).publish(
        tenant, Result(request_id=name, model_id=model_id, seq_id=seq_id, outcome=outcome)
    )


async def write(bus: Bus) -> None:
    """All of the table above."""
    await append(bus, "demo", "run:0", 0, CREATE)
    await append(bus, "other", "b", 0, CREATE_FULL, JSON)
    await append(bus, "demo", "run:0", 1, PASS)
    await append(bus, "demo", "run:0", 2, STEP)
    await append(bus, "demo", "run:0", 3, REFUSED)
    await append(bus, "other", "b", None, UnloadModel())
    await answer(bus, "demo", "run:0", 0, ModelCreated(model_id="run:0", base_model="tiny", lora=CREATE.lora))
    await answer(bus, "other", "b", 0, ModelCreated(model_id="b", base_model="small"))
    await answer(bus, "demo", "run:0", 1, DONE)
    await answer(bus, "demo", "run:0", 3, FAILED)
    await answer(bus, "other", "b", None, ModelUnloaded(model_id="b"))
    ledger = await Ledger.open(bus, GROUP)
    await ledger.record("run:0", 0, "hash-0", "done", 1)
    await ledger.record("run:0", 1, "hash-1", "done", 3)
    await ledger.record("run:0", 3, "hash-3", "failed", 5, horizon=5)
    tables = await Tables.open(bus)
    await tables.models.put(
        "run:0", ModelRow(tenant="demo", base_model="tiny", created_at=1.0, status="live")
    )
    await tables.models.put("c", ModelRow(tenant="other", base_model="", created_at=2.0))
