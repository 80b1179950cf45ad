"""One operation written by hand: JSON and nats-py, nothing of ours in between."""

from __future__ import annotations

import json

import nats

from runtime.demo.failure import DemoFailed
from runtime.demo.records import ByHand
from runtime.demo.rot13 import Example
from runtime.demo.server import Endpoints

WAIT_S = 120.0


async def score_by_hand(server: Endpoints, model_id: str, seq_id: int, example: Example) -> ByHand:
    """Publish a forward-only `forward_backward` under the model's next number, and wait for its result.

    `model_id` consists of letters, digits and dashes: as any other it would have to be escaped in the subjects.
    """
    submission = {
        "seq_id": seq_id,
        "op": {
            "type": "forward_backward",
            "data": [
                {
                    "model_input": example.tokens,
                    "loss_fn_inputs": {"target_tokens": example.targets, "weights": example.weights},
                }
            ],
            "loss": {"name": "cross_entropy"},
            "forward_only": True,
        },
    }
    nc = await nats.connect(server.nats, user=server.tenant, password=server.nats_password)
    try:
        results = await nc.subscribe(f"tinker.v1.results.{server.tenant}.{model_id}.{seq_id}")
        subject = f"tinker.v1.submit.{server.tenant}.{model_id}"
        headers = {"Content-Type": "application/json"}
        stored = await nc.request(subject, json.dumps(submission).encode(), timeout=WAIT_S, headers=headers)
        if "error" in json.loads(stored.data):
            raise DemoFailed(f"the broker did not store the operation: {stored.data.decode()}")
        message = await results.next_msg(timeout=WAIT_S)
    finally:
        await nc.close()
    content_type = (message.headers or {}).get("Content-Type", "")
    outcome = json.loads(message.data)["outcome"]
    if outcome["type"] == "failed":
        raise DemoFailed(f"the operation written by hand failed: {outcome['error']}")
    return ByHand(subject, content_type, outcome["metrics"]["loss:sum"] / sum(example.weights))
