"""Requests above what the broker carries in one message, on a broker that takes 1 MiB in one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from bus import subjects
from bus.embedded import EmbeddedBroker
from bus.events import ForwardBackward, Tensor
from runtime.config import Limits
from tests.runtime.conftest import PASSWORDS, service_on
from tests.runtime.ingress.conftest import Wire, client
from tests.runtime.stand_in import Service

POSITIONS, TARGETS = 2_000, 64


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    with EmbeddedBroker(tmp_path / "broker", PASSWORDS, max_payload=2**20) as broker:
        async with service_on(broker, tmp_path) as started:
            yield started


def many_targets(model_id: str, seq_id: int, positions: int = POSITIONS) -> bytes:
    """A request of one datum with 64 targets a position, as the SDK's own code writes it."""
    targets = np.arange(positions * TARGETS, dtype=np.int64).reshape(positions, TARGETS) % 320
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(list(range(positions))),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(targets),
            "weights": types.TensorData.from_numpy(np.full(targets.shape, 0.5, np.float32)),
        },
    )
    data = types.ForwardBackwardInput(data=[datum], loss_fn="cross_entropy")
    request = types.ForwardBackwardRequest(forward_backward_input=data, model_id=model_id, seq_id=seq_id)
    body: bytes = forward_backward_request_to_proto(request).SerializeToString()
    return body


async def test_a_datum_above_one_message_is_trained_on_and_read_back_equal(service: Service) -> None:
    replica = await service.replica()
    async with client(replica.url, "tml-alice") as http:
        alice = Wire(http)
        model = await alice.model()
        body = many_targets(model, 1)
        assert len(body) > 1_500_000
        answer = await alice.result(await alice.forward_backward(body))
        assert answer.headers["content-type"] == "application/x-protobuf"
        entry = await service.log.get(model, 1)
        assert entry is not None
        assert entry.blob is not None
        whole = await service.log.whole(entry)
        assert whole.body == body
        op = whole.op()
        assert isinstance(op, ForwardBackward)
        targets = op.data[0].loss_fn_inputs["target_tokens"]
        assert isinstance(targets, Tensor)
        assert targets.shape == (POSITIONS, TARGETS)
        again = await alice.forward_backward(body)
        assert again.json()["request_id"] == f"{model}#1"
        assert (await alice.result(await alice.optim_step(model, 2))).status_code == 200
        assert list(replica.deps.bus.errors) == []


async def test_a_datum_above_the_limit_is_refused_by_name_before_anything_of_it_is_stored(
    service: Service,
) -> None:
    limits = Limits(max_datum_bytes=1_600_000)
    replica = await service.replica(msgspec.structs.replace(service.settings, limits=limits))
    async with client(replica.url, "tml-alice") as http:
        alice = Wire(http)
        model = await alice.model()
        error = await alice.error(await alice.forward_backward(many_targets(model, 1, 4_000)))
        assert error.startswith("data[0] has ")
        assert "the limit is 1600000 (limits.max_datum_bytes)" in error
        assert (await service.bus.js.stream_info(subjects.BLOB_STREAM)).state.messages == 0
        assert (await alice.result(await alice.forward_backward(many_targets(model, 2)))).status_code == 200
        assert list(replica.deps.bus.errors) == []
