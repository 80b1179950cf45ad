"""SIGKILL exactly between two effects, on two ranks and with snapshots: the run ends with the same bits each time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tinker
import torch
from tinker import types

from tests.e2e.conftest import Served, served
from tests.support import dumps, mutants, sdk
from tests.support.requests import datums

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

ADAM = types.AdamParams(learning_rate=1e-2)
MOST_STEPS = 12
"""In which a snapshot has surely been taken, and the log trimmed."""
PLACES = (
    "on the log, sender not answered",
    "gradient added on rank 0 alone",
    "rank 0 waits in finalize",
    "finalized, not stepped",
    "stepped on rank 0 alone",
    "stepped, not answered",
    "answered, result not published",
    "result published, not in the ledger",
    "in the ledger, not settled",
    "snapshot written, without a manifest",
    "snapshot with a manifest, not renamed",
    "snapshot there, row not changed",
    "row says trimmed, log is not",
    "log trimmed",
)


@dataclass(frozen=True)
class Faulty:
    at: Served
    file: Path
    undisturbed: str
    """A model that took every step without a fault."""

    def dumped(self, model_id: str, step: int) -> dict[str, dict[str, torch.Tensor]]:
        return dumps.read(self.at.dumps, model_id, step)


def step(client: tinker.TrainingClient, number: int) -> types.OptimStepResponse:
    """The same for every model: two calls and a step, sent ahead."""
    for call in range(2):
        tokens, inputs = datums((5, 9, 3), seed=10 * number + call)
        batch = [sdk.sdk_datum(t, i.tensors) for t, i in zip(tokens, inputs, strict=True)]
        client.forward_backward(batch, "cross_entropy")
    return client.optim_step(ADAM).result(timeout=300)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    folder = tmp_path_factory.mktemp("faulty")
    file = folder / "fault.txt"
    for at in served(
        folder,
        environment=mutants.fault_environment(file),
        layout={"dp": 2},
        packing={"max_datums_per_microbatch": 1},
        recovery={"heartbeat_timeout_s": 5, "lease_s": 2, "replay_budget_s": 0.2},
    ):
        client = sdk.training_client(at.service)
        for number in range(MOST_STEPS + 1):
            step(client, number)
        yield Faulty(at, file, sdk.model_id(client))


@pytest.mark.parametrize("place", PLACES)
def test_a_process_killed_between_two_effects_changes_no_bit(faulty: Faulty, place: str) -> None:
    client = sdk.training_client(faulty.at.service)
    model_id = sdk.model_id(client)
    step(client, 0)
    done = faulty.file.with_suffix(".done")
    done.unlink(missing_ok=True)
    faulty.file.write_text(f"{place} {model_id}")
    number = 0
    while not done.exists():
        assert number < MOST_STEPS, f"no process came to {place!r}"
        number += 1
        step(client, number)
    number += 1
    last = step(client, number)
    assert last.metrics["step"] == number + 1
    assert last.metrics["window_calls"] == 2
    for kind, tensors in faulty.dumped(faulty.undisturbed, number).items():
        found = faulty.dumped(model_id, number)[kind]
        for name, tensor in tensors.items():
            assert torch.equal(tensor, found[name]), (kind, name)
    assert faulty.at.service.metric("tinkerbus_replay_mismatches_total") == 0
