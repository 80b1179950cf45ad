"""SDKs of the past against the ingress: opt-in, since each needs an environment of its own.

`OLD_SDKS=/path/to/0.12/bin/python:/path/to/0.25/bin/python pytest tests/runtime/ingress/test_old_sdks.py`
"""

from __future__ import annotations

import asyncio
import json
import os

import pytest

from tests.runtime.ingress.checkpoints import put
from tests.runtime.ingress.conftest import Wire
from tests.runtime.stand_in import Replica, Service

PYTHONS = [python for python in os.environ.get("OLD_SDKS", "").split(":") if python]

PROGRAM = """
import json, sys, tinker
from tinker import types
url, run = sys.argv[1:]
service = tinker.ServiceClient(base_url=url, api_key="tml-alice")
model = service.create_lora_training_client(base_model="tiny", rank=4)
inputs = {"target_tokens": [8, 16, 24], "weights": [1.0, 1.0, 1.0]}
datum = types.Datum(model_input=types.ModelInput.from_ints([8, 16, 24]), loss_fn_inputs=inputs)
passed = model.forward_backward([datum] * 5, "cross_entropy")
stepped = model.optim_step(types.AdamParams(learning_rate=0.5))
done = passed.result()
rest = service.create_rest_client()
print(json.dumps({
    "loss": done.metrics["loss:sum"],
    "logprobs": [list(map(float, one["logprobs"].to_numpy())) for one in done.loss_fn_outputs],
    "step": stepped.result().metrics["learning_rate"],
    "forward_only": model.forward([datum], "cross_entropy").result().metrics["forward_only:max"],
    "run": rest.get_training_run(run).result().training_run_id,
    "checkpoints": [one.checkpoint_id for one in rest.list_checkpoints(run).result().checkpoints],
    "rank": rest.get_weights_info_by_tinker_path(f"tinker://{run}/weights/a").result().lora_rank,
    "archive": rest.get_checkpoint_archive_url(run, "weights/a").result().url,
}))
"""


@pytest.mark.skipif(not PYTHONS, reason="OLD_SDKS names no Python with an older tinker")
@pytest.mark.parametrize("python", PYTHONS)
async def test_an_old_sdk_trains_and_looks_around(
    python: str, ingress: Replica, alice: Wire, service: Service
) -> None:
    run = await alice.model()
    await put(service, run, "weights/a")
    process = await asyncio.create_subprocess_exec(
        *(python, "-c", PROGRAM, ingress.url, run),
        env={**os.environ, "TINKER_TELEMETRY": "0", "NO_PROXY": "*", "PYTHONPATH": ""},
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0
    found = json.loads(out.decode().splitlines()[-1])
    archive = found.pop("archive")
    assert archive.startswith(f"{ingress.url}/api/v1/downloads/{run}/weights/a?")
    assert found == {
        "loss": 30.0,
        "logprobs": [[-1.0, -2.0, -3.0]] * 5,
        "step": 0.5,
        "forward_only": 1.0,
        "run": run,
        "checkpoints": ["weights/a"],
        "rank": 4,
    }
