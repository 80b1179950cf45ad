"""Kill everything inside a window; start again on the same data, from the log alone and from snapshots."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from tinker import types

from bus import subjects
from bus.codec import MSGPACK, encode
from bus.connection import connect
from bus.embedded import EmbeddedBroker
from bus.events import OptimStepDone
from bus.results import Results
from bus.subjects import escape
from tests.support import dumps, sdk
from tests.support.requests import datums
from tests.support.service import Service, free_port, left_over

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ADAM = types.AdamParams(learning_rate=1e-3)


def batch(seed: int) -> list[types.Datum]:
    tokens, inputs = datums((7, 3, 11), seed=seed)
    return [sdk.sdk_datum(t, i.tensors) for t, i in zip(tokens, inputs, strict=True)]


@pytest.mark.timeout(600)
def test_a_killed_service_goes_on_with_the_same_bits_and_the_client_does_not_notice(tmp_path: Path) -> None:
    config = tmp_path / "tinkerbus.toml"
    dump = tmp_path / "dumps"
    config.write_text(f"[debug]\ndump_gradients = {json.dumps(str(dump))}\n")
    service = Service(tmp_path / "data", ("--config", str(config)), port=free_port()).start()
    try:
        undisturbed, killed = sdk.training_client(service), sdk.training_client(service)
        names = {
            name: sdk.model_id(client) for name, client in (("undisturbed", undisturbed), ("killed", killed))
        }
        for client in (undisturbed, killed):
            client.forward_backward(batch(1), "cross_entropy")
            client.optim_step(ADAM).result(timeout=sdk.WAIT_S)
        undisturbed.forward_backward(batch(2), "cross_entropy")
        undisturbed.optim_step(ADAM).result(timeout=sdk.WAIT_S)

        killed.forward_backward(batch(2), "cross_entropy").result(timeout=sdk.WAIT_S)
        tree = service.kill_tree()
        assert left_over(tree) == []

        # The client goes on against a dead server, and waits.
        results: list[types.OptimStepResponse] = []
        waiting = threading.Thread(
            target=lambda: results.append(killed.optim_step(ADAM).result(timeout=300)), daemon=True
        )
        waiting.start()
        waiting.join(2)
        assert waiting.is_alive()

        service.start()
        waiting.join(300)
        assert results
        assert results[0].metrics["step"] == 2
        assert results[0].metrics["window_calls"] == 1
        for kind, tensors in dumps.read(dump, names["undisturbed"], 1).items():
            for name, tensor in tensors.items():
                assert torch.equal(tensor, dumps.read(dump, names["killed"], 1)[kind][name]), (kind, name)
        tree = service.tree()
        assert service.stop() == 0
        assert left_over(tree) == []
    finally:
        service.stop()


@pytest.mark.timeout(900)
def test_a_service_goes_on_from_snapshots_with_the_same_bits_and_knows_what_was_trimmed(
    tmp_path: Path,
) -> None:
    config, dump = tmp_path / "tinkerbus.toml", tmp_path / "dumps"
    config.write_text(
        f"[debug]\ndump_gradients = {json.dumps(str(dump))}\n"
        "[layout]\ndp = 2\ndistributed_optimizer = true\n"
        "[recovery]\nreplay_budget_s = 0.3\n"
    )
    service = Service(tmp_path / "data", ("--config", str(config)), port=free_port()).start()
    try:
        clients = {name: sdk.training_client(service) for name in ("undisturbed", "killed")}
        names = {name: sdk.model_id(client) for name, client in clients.items()}
        for step in range(8):
            for client in clients.values():
                client.forward_backward(batch(2 * step), "cross_entropy")
                client.forward_backward(batch(2 * step + 1), "cross_entropy")
                client.optim_step(ADAM).result(timeout=sdk.WAIT_S)
        for client in clients.values():
            client.forward_backward(batch(50), "cross_entropy").result(timeout=sdk.WAIT_S)
        undisturbed, killed = clients["undisturbed"], clients["killed"]
        undisturbed.forward_backward(batch(51), "cross_entropy")
        undisturbed.optim_step(ADAM).result(timeout=sdk.WAIT_S)
        for model_id in names.values():
            kept = list((service.data / "snapshots" / "main" / escape(model_id)).iterdir())
            assert len([place for place in kept if not place.name.startswith("aside-")]) >= 2
        service.kill_tree()

        service.start()
        assert replayed(service) < len(clients) * 8 * 3
        # What was sent long ago is known, though the log has it no more.
        assert resend(service, names["killed"], 3, 1e-3) == (200, f"{names['killed']}#3")
        status, error = resend(service, names["killed"], 3, 2e-3)
        assert status == 400
        assert "seq_id 3" in error
        killed.forward_backward(batch(51), "cross_entropy")
        last = killed.optim_step(ADAM).result(timeout=sdk.WAIT_S)
        assert last.metrics["step"] == 9
        assert last.metrics["window_calls"] == 2
        for kind, tensors in dumps.read(dump, names["undisturbed"], 8).items():
            for name, tensor in tensors.items():
                assert torch.equal(tensor, dumps.read(dump, names["killed"], 8)[kind][name]), (kind, name)
        # All of it comes out the same on ranks of its own, beside the service; what somebody changed is found.
        code, found = verified(service, config)
        assert code == 0, found
        tallies = {row["model_id"]: row for row in found if row["kind"] == "model"}
        for model_id in names.values():
            assert tallies[model_id]["begins"].startswith("snapshot before")
            assert tallies[model_id]["same"] > 0
            assert [tallies[model_id][kind] for kind in ("differs", "not_reached")] == [0, 0]
        assert service.stop() == 0
        step = asyncio.run(tampered(service, names["killed"]))
        code, found = verified(service, config, names["killed"])
        (differing,) = [row for row in found if row.get("verdict") == "differs"]
        assert (code, differing["seq_id"]) == (1, step)
        assert [(one["field"], one["by"]) for one in differing["differences"]] == [("metrics.step", 1.0)]
        config.write_text(f"{config.read_text()}\n[packing]\nmax_datums_per_microbatch = 1\n")
        assert "max_datums_per_microbatch=0 and is" in refused_start(service)
    finally:
        service.stop()


def refused_start(service: Service) -> str:
    """What `up` says when it does not go on from what is in the data folder."""
    command = [
        str(Path(sys.executable).with_name("tinkerbus")),
        "up",
        "--data",
        str(service.data),
        "--port",
        "0",
    ]
    done = subprocess.run(
        [*command, *service.options], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 1, done
    assert done.stdout == ""
    return done.stderr.splitlines()[-1]


def verified(service: Service, config: Path, *model: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit code of `tinkerbus log verify`, and what it says."""
    command = [str(Path(sys.executable).with_name("tinkerbus")), "log", "verify", *model]
    options = ("--data", str(service.data), "--config", str(config), "--json")
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout, done.stderr
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


async def tampered(service: Service, model_id: str) -> int:
    """Another result in the place of the last step's, in the broker of a service that does not run; its number."""
    with EmbeddedBroker(service.data / "nats") as broker:
        async with await connect(broker.url, broker.credentials, name="test") as bus:
            results = Results(bus)
            seq_id = max(n for n in await results.numbers("default", model_id) if n is not None)
            stored = await results.get("default", model_id, seq_id)
            assert stored is not None
            result = stored.result()
            assert isinstance(result.outcome, OptimStepDone)
            metrics = {**result.outcome.metrics, "step": result.outcome.metrics["step"] + 1}
            changed = replace(result, outcome=OptimStepDone(metrics=metrics))
            subject = subjects.results("default", model_id, seq_id)
            await bus.js.publish(subject, encode(changed), headers={"Content-Type": MSGPACK})
            return seq_id


def replayed(service: Service) -> int:
    with urllib.request.urlopen(service.metrics, timeout=10) as answer:
        page = answer.read().decode()
    found = re.findall(r"^tinkerbus_replayed_operations_total{.*} (\S+)$", page, re.MULTILINE)
    return int(sum(map(float, found)))


def resend(service: Service, model_id: str, seq_id: int, learning_rate: float) -> tuple[int, str]:
    """An optimizer step by hand: the status, and the request id or the error."""
    adam = ADAM.model_copy(update={"learning_rate": learning_rate}).model_dump(exclude_none=True)
    body = {"model_id": model_id, "seq_id": seq_id, "type": "optim_step", "adam_params": adam}
    request = urllib.request.Request(
        f"{service.http}/api/v1/optim_step",
        json.dumps(body).encode(),
        {"content-type": "application/json", "x-api-key": service.api_key},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.loads(response.read())["request_id"]
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["detail"]
