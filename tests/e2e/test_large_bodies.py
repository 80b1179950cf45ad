"""A service on a broker of the operator's own that takes 1 MiB in a message: large batches, datums and answers."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
import tinker
from tinker import types

from bus.embedded import EmbeddedBroker
from tests.support import sdk
from tests.support.service import Service, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

ADAM = types.AdamParams(learning_rate=1e-3)
MAX_DATUM_BYTES = 20_000_000


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("large")
    with EmbeddedBroker(folder / "broker", max_payload=2**20) as broker:
        credentials = broker.credentials
        config = folder / "tinkerbus.toml"
        config.write_text(
            f"[nats]\nurl = {json.dumps(broker.url)}\nuser = {json.dumps(credentials.user)}\n"
            f"password = {json.dumps(credentials.password)}\n"
            f"[limits]\nmax_datum_bytes = {MAX_DATUM_BYTES}\n"
        )
        started = Service(folder / "data", ("--config", str(config)), port=free_port())
        try:
            yield started.start()
        finally:
            started.stop()


def datum(positions: int, targets: int, seed: int) -> types.Datum:
    """One with many targets a position, which is what makes a datum large."""
    random = np.random.default_rng(seed)
    shape = (positions, targets)
    return types.Datum(
        model_input=types.ModelInput.from_ints(random.integers(0, 256, positions).tolist()),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(random.integers(0, 256, shape)),
            "weights": types.TensorData.from_numpy(random.standard_normal(shape).astype(np.float32)),
        },
    )


def weighted(data: list[types.Datum], output: types.ForwardBackwardOutput) -> float:
    """The loss by hand: minus weights times the logprobs that came back."""
    total = 0.0
    for one, record in zip(data, output.loss_fn_outputs, strict=True):
        weights = one.loss_fn_inputs["weights"].to_numpy().astype(np.float64)
        total -= float((weights * record["logprobs"].to_numpy().reshape(weights.shape)).sum())
    return total


def trained(client: tinker.TrainingClient, data: list[types.Datum]) -> types.ForwardBackwardOutput:
    return client.forward_backward(data, "cross_entropy").result(timeout=sdk.WAIT_S)


def test_a_batch_of_5_mb_trains_in_messages_of_one(service: Service) -> None:
    client = sdk.training_client(service)
    data = [datum(500, 64, seed) for seed in range(14)]
    assert sum(one.loss_fn_inputs["weights"].to_numpy().nbytes * 3 for one in data) > 5_000_000
    output = trained(client, data)
    assert len(output.loss_fn_outputs) == len(data)
    assert output.metrics["loss:sum"] == pytest.approx(weighted(data, output), rel=1e-5)
    step = client.optim_step(ADAM).result(timeout=sdk.WAIT_S)
    assert step.metrics["window_calls"] > 5  # so many messages
    assert step.metrics["window_tokens"] == 500 * 14


def test_a_datum_above_a_message_trains_and_its_replay_has_the_same_bits(service: Service) -> None:
    data = [datum(2_000, 64, 1)]
    undisturbed, killed = sdk.training_client(service), sdk.training_client(service)
    steps = {}
    for client in (undisturbed, killed):
        output = trained(client, data)
        assert output.metrics["loss:sum"] == pytest.approx(weighted(data, output), rel=1e-5)
    steps["undisturbed"] = undisturbed.optim_step(ADAM).result(timeout=sdk.WAIT_S)
    service.kill_tree()
    service.start()
    steps["killed"] = killed.optim_step(ADAM).result(timeout=sdk.WAIT_S)
    assert steps["killed"].metrics == steps["undisturbed"].metrics
    after = [
        sdk.logprobs(client.forward(data, "cross_entropy").result(timeout=sdk.WAIT_S))
        for client in (undisturbed, killed)
    ]
    assert sdk.equal(*after)


def test_a_datum_above_the_limit_is_refused_by_name_and_the_connection_goes_on(service: Service) -> None:
    client = sdk.training_client(service)
    with pytest.raises(
        Exception, match=rf"data\[0\] has \d+ bytes.*{MAX_DATUM_BYTES} \(limits.max_datum_bytes"
    ):
        trained(client, [datum(2_000, 900, 2)])
    data = [datum(20, 2, 3)]
    output = trained(client, data)
    assert output.metrics["loss:sum"] == pytest.approx(weighted(data, output), rel=1e-5)
    assert client.optim_step(ADAM).result(timeout=sdk.WAIT_S).metrics["step"] == 1


def test_an_answer_above_4_mb_comes_through(service: Service) -> None:
    client = sdk.training_client(service)
    data = [datum(2_000, 600, 4)]
    output = client.forward(data, "cross_entropy").result(timeout=sdk.WAIT_S)
    (logprobs,) = sdk.logprobs(output)
    assert logprobs.numel() * 4 > 4_500_000
    assert output.metrics["loss:sum"] == pytest.approx(weighted(data, output), rel=1e-4)
