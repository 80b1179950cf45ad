"""A model trained for one step with nats-py and JSON alone, as from any language that has a NATS client.

TINKERBUS_NATS_URL and TINKERBUS_NATS_PASSWORD say where; the user of the broker is the tenant. A model's id stands in
the subjects as it is when it consists of letters, digits, "-" and "_"; other characters are escaped.
"""

import asyncio
import json
import os

import nats
from nats.aio.client import Client

TENANT = "default"
MODEL = f"by-hand-{os.getpid()}"


async def run(nc: Client, seq_id: int, op: dict[str, object]) -> dict[str, object]:
    """Submit one operation and wait for its one result. Numbers are 0 for the creation, then 1, 2, 3 …"""
    results = await nc.subscribe(f"tinker.v1.results.{TENANT}.{MODEL}.{seq_id}")
    body = json.dumps({"seq_id": seq_id, "op": op}).encode()
    headers = {"Content-Type": "application/json"}
    # The broker answers as soon as the operation is on its disk, or says why it is not.
    answer = await nc.request(f"tinker.v1.submit.{TENANT}.{MODEL}", body, timeout=30, headers=headers)
    if "error" in (stored := json.loads(answer.data)):
        raise RuntimeError(stored["error"]["description"])
    outcome = json.loads((await results.next_msg(timeout=300)).data)["outcome"]
    if outcome["type"] == "failed":
        raise RuntimeError(f"{outcome['error']} (field {outcome['field']})")
    return outcome


async def main() -> None:
    nc = await nats.connect(
        os.environ["TINKERBUS_NATS_URL"], user=TENANT, password=os.environ["TINKERBUS_NATS_PASSWORD"]
    )
    text = list(b"to be, or not to be, that is the question")
    batch = {
        "type": "forward_backward",
        "data": [
            {
                "model_input": text[:-1],
                "loss_fn_inputs": {"target_tokens": text[1:], "weights": [1.0] * len(text[1:])},
            }
        ],
        "loss": {"name": "cross_entropy"},
    }
    print(await run(nc, 0, {"type": "create_model", "base_model": "tiny", "lora": {"rank": 8}}))
    before = await run(nc, 1, batch)
    print(await run(nc, 2, {"type": "optim_step", "adam_params": {"learning_rate": 5e-3}}))
    after = await run(nc, 3, batch | {"forward_only": True})
    print(
        f"loss {before['metrics']['loss:sum']:.2f} nats before the step, {after['metrics']['loss:sum']:.2f} after"
    )
    await nc.close()


asyncio.run(main())
