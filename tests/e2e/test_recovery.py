"""Kill everything between a `forward_backward` and its `optim_step`; start again on the same data."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from tinker import types

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
