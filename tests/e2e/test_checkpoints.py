"""Checkpoints through the official SDK and the event client: a whole service, killed where it matters."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import tinker
import torch
from tinker import types
from torch import Tensor

from bus.client import Checkpoint, LoraConfig, connect
from bus.events import WeightsLoaded, WeightsSaved
from bus.subjects import escape
from tests.e2e.conftest import Served
from tests.support import dumps, reference, sdk
from tests.support.models import assert_same_bits
from tests.support.requests import datums
from tests.support.service import Service, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

ADAM = types.AdamParams(learning_rate=1e-3, eps=1e-8)
KILLS = int(os.environ.get("CHECKPOINT_KILLS", "1"))
"""Saves during which everything is killed; the whole check has 20."""


def batch(seed: int) -> list[types.Datum]:
    tokens, inputs = datums((7, 3, 11), seed=seed)
    return [sdk.sdk_datum(t, i.tensors) for t, i in zip(tokens, inputs, strict=True)]


def train(client: tinker.TrainingClient, *seeds: int) -> dict[str, float]:
    """A step for each seed; what the last one reported."""
    for seed in seeds:
        client.forward_backward(batch(seed), "cross_entropy")
        step = client.optim_step(ADAM).result(timeout=sdk.WAIT_S)
    metrics: dict[str, float] = step.metrics
    return metrics


def from_state(service: Service, path: str, *, optimizer: bool = True) -> tinker.TrainingClient:
    client = sdk.service_client(service)
    if optimizer:
        return client.create_training_client_from_state_with_optimizer(path)
    return client.create_training_client_from_state(path)


def dumped(folder: Path, client: tinker.TrainingClient, step: int) -> dict[str, Tensor]:
    found = dumps.read(folder, sdk.model_id(client), step)
    return {f"{kind}.{name}": values for kind, tensors in found.items() for name, values in tensors.items()}


def result(future: Any) -> Any:
    return future.result(timeout=sdk.WAIT_S)


def folders(service: Service) -> list[Path]:
    """Of every checkpoint, whole or not."""
    return sorted((service.data / "checkpoints").glob("*/*/*"))


def test_a_saved_state_goes_on_elsewhere_bit_for_bit_or_with_a_cold_optimizer(two_ranks: Served) -> None:
    service, folder = two_ranks.service, two_ranks.dumps
    client = sdk.training_client(service, rank=4)
    train(client, 1, 2)
    sent = client.save_state("at-2")  # and on, without waiting for it
    train(client, 3, 4)
    path = result(sent).path
    assert path == f"tinker://{sdk.model_id(client)}/weights/at-2"

    warm = from_state(service, path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        assert warm.get_info().lora_rank == 4
        assert warm.get_info().model_data.model_name == "tiny"
    assert train(warm, 3, 4)["step"] == 4

    other = sdk.training_client(service, rank=4, seed=99)  # one with a history and an open window
    train(other, 8)
    other.forward_backward(batch(9), "cross_entropy")
    other.load_state_with_optimizer(path)
    reported = train(other, 3, 4)
    assert (reported["step"], reported["window_calls"]) == (4, 1)
    for step in (2, 3):
        for model in (warm, other):
            assert_same_bits(dumped(folder, model, step), dumped(folder, client, step))

    cold = from_state(service, path, optimizer=False)
    assert train(cold, 3)["step"] == 1
    found, wanted = dumped(folder, cold, 0), dumped(folder, client, 2)
    for name, values in found.items():
        if name.startswith(("gradient.", "before.")):
            assert torch.equal(values, wanted[name]), name
        if name.startswith("exp_avg."):
            gradient = found[name.replace("exp_avg.", "gradient.")]
            assert torch.allclose(values, (1 - ADAM.beta1) * gradient, rtol=1e-5, atol=1e-12), name


def test_names_owners_and_states_are_checked_and_a_refusal_changes_nothing(two_ranks: Served) -> None:
    service = two_ranks.service
    client = sdk.training_client(service, rank=4)
    train(client, 1)
    path = result(client.save_state("x")).path
    sampler = result(client.save_weights_for_sampler("x")).path
    exported = result(client.save_weights_external("x"))
    assert {path.split("/")[3] for path in (path, sampler, exported.path)} == {
        "weights",
        "sampler_weights",
        "external_weights",
    }
    client.forward_backward(batch(2), "cross_entropy")
    refused = {
        "is there already": lambda: client.save_state("x"),
        "is not known": lambda: client.load_state(path + "y"),
        "is not a checkpoint's": lambda: client.load_state("tinker://x/y"),
        "holds no optimizer state": lambda: client.load_state_with_optimizer(sampler),
    }
    for says, ask in refused.items():
        with pytest.raises(tinker.RequestFailedError, match=says) as caught:
            result(ask())
        assert caught.value.category == types.RequestErrorCategory.User
    wider = sdk.training_client(service, rank=8)
    with pytest.raises(tinker.RequestFailedError, match="lora rank 4, and the model has 8"):
        result(wider.load_state(path))
    step = result(client.optim_step(ADAM)).metrics
    assert (step["step"], step["window_calls"]) == (2, 1)

    before = folders(service)
    result(client.save_state("x", overwrite=True))
    assert len(folders(service)) == len(before)
    again = from_state(service, path)
    assert train(again, 5)["step"] == 3


def test_what_is_exported_is_what_was_trained(two_ranks: Served) -> None:
    service = two_ranks.service
    client = sdk.training_client(service, rank=4)
    train(client, 1, 2)
    result(client.save_weights_external("out"))
    model_id = sdk.model_id(client)
    (folder,) = (service.data / "checkpoints" / escape(model_id) / "external_weights").iterdir()
    base = service.data / "models" / "tiny"
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # that a tied head does not stay tied: the adapter is the output's alone
        theirs = peft.PeftModel.from_pretrained(reference.load(base), folder)
    assert theirs.peft_config["default"].base_model_name_or_path == str(base)
    tokens, inputs = datums((7, 3, 11), seed=5)
    found = sdk.logprobs(result(client.forward(batch(5), "cross_entropy")))
    with torch.no_grad():
        wanted = [
            torch.log_softmax(theirs(input_ids=t[None]).logits[0], -1)
            .gather(1, datum.tensors["target_tokens"][:, None])
            .squeeze(1)
            for t, datum in zip(tokens, inputs, strict=True)
        ]
    assert reference.worst(found, wanted) <= 1e-5


async def test_an_event_client_saves_and_starts_from_what_it_saved(two_ranks: Served) -> None:
    service = two_ranks.service
    async with await connect(service.nats, tenant="default", password=service.nats_password) as client:
        name = f"events-{os.getpid()}"
        model = await client.create_model(name, base_model="tiny", lora=LoraConfig(rank=4))
        await (await model.optim_step(learning_rate=1e-3))
        saved = await (await model.save_weights("x"))
        assert saved == WeightsSaved(path=f"tinker://{name}/weights/x", size_bytes=saved.size_bytes)
        assert saved.path is not None
        loaded = await (await model.load_weights(saved.path, optimizer=True))
        assert loaded == WeightsLoaded(path=saved.path, model_id=name)
        start = Checkpoint(path=saved.path, optimizer=True)
        other = await client.create_model(f"{name}-b", start=start)
        step = await (await other.optim_step(learning_rate=1e-3))
        assert step.metrics["step"] == 2
        # Sent ahead: a load of what the operation before it saves.
        await other.save_weights("y")
        pending = await other.load_weights(f"tinker://{name}-b/weights/y")
        assert (await pending).model_id == f"{name}-b"
        for one in (model, other):
            await one.unload()


def test_a_state_outlives_the_service_and_a_killed_save_leaves_nothing(tmp_path: Path) -> None:
    config, dump = tmp_path / "tinkerbus.toml", tmp_path / "dumps"
    config.write_text(f"[debug]\ndump_gradients = {json.dumps(str(dump))}\n")
    service = Service(tmp_path / "data", ("--config", str(config)), port=free_port()).start()
    try:
        client = sdk.training_client(service)
        train(client, 1, 2)
        path = result(client.save_state("kept")).path
        loading = sdk.training_client(service)
        train(loading, 7)
        result(loading.load_state_with_optimizer(path))
        train(loading, 3)
        train(client, 3, 4)
        service.kill_tree()

        service.start()
        train(from_state(service, path), 3, 4)
        fresh = from_state(service, path)
        train(fresh, 3, 4)
        for step in (2, 3):
            assert_same_bits(dumped(dump, fresh, step), dumped(dump, client, step))

        chance = random.Random(KILLS)
        for number in range(KILLS):
            pending = client.save_state(f"killed-{number}")
            time.sleep(chance.uniform(0, 0.6))
            service.kill_tree()
            if number == 0:
                # What was loaded stands in a snapshot: its checkpoint is needed no more.
                for folder in folders(service):
                    if folder.name.startswith("kept."):
                        shutil.rmtree(folder)
            service.start()
            saved = result(pending).path  # the client has waited for it
            assert train(from_state(service, saved), 5)["step"] == 5
            assert_nothing_unlisted(service, sdk.model_id(client), number + 1)
        train(loading, 4)
        assert_same_bits(dumped(dump, loading, 3), dumped(dump, client, 3))
        assert service.metric("tinkerbus_replay_mismatches_total") == 0
        with pytest.raises(tinker.RequestFailedError, match="cannot be read") as caught:
            result(loading.load_state(path))
        assert caught.value.category == types.RequestErrorCategory.Server
        assert service.stop() == 0
    finally:
        service.stop()


def assert_nothing_unlisted(service: Service, model_id: str, saved: int) -> None:
    """Each save has one folder, which is whole, and nothing is left of tries that were killed."""
    deadline = time.monotonic() + 30
    while True:
        here = service.data / "checkpoints" / escape(model_id) / "weights"
        names = sorted(folder.name.split(".")[0] for folder in here.iterdir())
        names = [name for name in names if name != "kept"]
        left = list((service.data / "saving").glob("*"))
        if (names == [f"killed-{n}" for n in range(saved)] and not left) or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    assert names == [f"killed-{n}" for n in range(saved)]
    assert left == []
    for folder in here.iterdir():
        about = json.loads((folder / "tinkerbus.json").read_text())
        assert about["sizes"] == {
            file.name: file.stat().st_size for file in folder.iterdir() if file.name != "tinkerbus.json"
        }
