"""What cannot be honoured is refused by name, and uses up its number where it has one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import zstandard

from bus.connection import BrokerUnreachable
from bus.log import LogFull, OpsLog
from runtime.config import Http, Limits
from runtime.ingress.body import MAX_JSON_BYTES
from tests.runtime.ingress.conftest import Wire, client, sdk_body
from tests.runtime.stand_in import Service


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"adam_params": {"nesterov": True}}, "adam_params.nesterov"),
        (
            {"adam_params": None, "optimizer_params": {"type": "dimuon", "learning_rate": 0.1}},
            "optimizer_params.type",
        ),
        ({"micro_batches": 4}, "micro_batches"),
        ({"adam_params": {"beta1": "high"}}, "adam_params.beta1"),
    ],
)
async def test_a_step_that_cannot_be_honoured_fails_alone_and_names_the_field(
    alice: Wire, change: dict[str, Any], field: str
) -> None:
    model = await alice.model()
    refused = await alice.optim_step(model, 1, **change)
    after = await alice.optim_step(model, 2)
    assert field in await alice.error(refused)
    assert "metrics" in (await alice.result(after)).json()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, "optimizer_config.type is 'dimuon'"),
        ({"lora_config": {"rank": 4, "alpha": 32}}, "lora_config.alpha"),
        ({"base_model": "gpt-5"}, "base_model 'gpt-5' is not served"),
        ({"base_model": None}, "base_model"),
    ],
)
async def test_a_model_that_cannot_be_made_fails_through_its_future(
    alice: Wire, change: dict[str, Any], says: str
) -> None:
    assert says in await alice.error(await alice.create_model(await alice.session(), **change))


async def test_an_endpoint_of_later_uses_up_its_number_and_says_so(alice: Wire) -> None:
    model = await alice.model()
    refused = await alice.post("forward", {"model_id": model, "seq_id": 1, "path": "x", "type": "forward"})
    after = await alice.optim_step(model, 2)
    assert (await alice.error(refused)).startswith("forward is not served")
    assert "metrics" in (await alice.result(after)).json()


@pytest.mark.parametrize("endpoint", ["create_custom_loss", "copy_weights", "weights_info"])
async def test_an_endpoint_of_later_without_a_number_is_refused_at_once(alice: Wire, endpoint: str) -> None:
    answer = await alice.post(endpoint, {})
    assert answer.status_code == 400
    assert answer.json()["detail"].startswith(f"{endpoint} is not served")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"seq_id": 1, "adam_params": {}}, "model_id is missing"),
        ({"model_id": 5, "seq_id": 1}, "model_id is 5"),
        ({"model_id": "m", "adam_params": {}}, "seq_id is missing"),
        ({"model_id": "m", "seq_id": 0}, "seq_id is 0, but has to be a whole number from 1"),
        ({"model_id": "m", "seq_id": 2**31}, "seq_id is 2147483648"),
        ({"model_id": "m", "seq_id": True}, "seq_id is True"),
        ([], "the body is a JSON list"),
    ],
)
async def test_a_request_without_identity_is_a_400_that_says_what_is_missing(
    alice: Wire, body: Any, says: str
) -> None:
    answer = await alice.post("optim_step", body)
    assert answer.status_code == 400
    assert says in answer.json()["detail"]


@pytest.mark.parametrize(
    "body", [b"", b"\x0a\x05m", b"{}", b"\x10\x01"], ids=["empty", "cut", "JSON", "no model"]
)
async def test_protobuf_without_identity_is_a_400(alice: Wire, body: bytes) -> None:
    answer = await alice.forward_backward(body)
    assert answer.status_code == 400
    assert answer.json()["detail"]


async def test_a_json_forward_backward_of_an_old_sdk_uses_up_its_number(alice: Wire) -> None:
    model = await alice.model()
    refused = await alice.post(
        "forward_backward", {"model_id": model, "seq_id": 1, "forward_backward_input": {}}
    )
    assert "Content-Type" in await alice.error(refused)


async def test_zstd_bodies_are_the_same_request(alice: Wire) -> None:
    model = await alice.model()
    body = sdk_body(model, 1)
    packed = await alice.forward_backward(zstandard.compress(body), **{"content-encoding": "zstd"})
    plain = await alice.forward_backward(body)
    assert packed.json() == plain.json()
    assert (await alice.result(plain)).headers["content-type"] == "application/x-protobuf"


async def test_an_unknown_encoding_is_refused(alice: Wire) -> None:
    answer = await alice.forward_backward(b"x", **{"content-encoding": "br"})
    assert answer.status_code == 415
    assert "'br'" in answer.json()["detail"]


async def test_a_body_past_the_servers_limit_is_not_read_on(service: Service) -> None:
    settings = msgspec.structs.replace(service.settings, http=Http(max_body_bytes=1000))
    replica = await service.replica(settings)
    async with client(replica.url, "tml-alice") as http:
        for body, headers in [
            (bytes(1001), {}),
            (zstandard.compress(bytes(10**6)), {"content-encoding": "zstd"}),
        ]:
            answer = await Wire(http).forward_backward(body, **headers)
            assert answer.status_code == 413
            assert "1000 bytes" in answer.json()["detail"]


async def test_json_past_its_limit_is_refused(alice: Wire) -> None:
    answer = await alice.post("optim_step", {"model_id": "x" * MAX_JSON_BYTES})
    assert answer.status_code == 413


async def test_a_datum_above_the_limit_uses_up_its_number_and_is_named(service: Service) -> None:
    settings = msgspec.structs.replace(service.settings, limits=Limits(max_datum_bytes=100_000))
    replica = await service.replica(settings)
    async with client(replica.url, "tml-alice") as http:
        alice = Wire(http)
        model = await alice.model()
        refused = await alice.forward_backward(sdk_body(model, 1, [1] * 10_000))
        after = await alice.optim_step(model, 2)
        error = await alice.error(refused)
        assert "data[0] has 1" in error
        assert "the limit is 100000 (limits.max_datum_bytes)" in error
        assert "metrics" in (await alice.result(after)).json()
        entry = await service.log.get(model, 1)
        assert entry is not None
        assert entry.size < 1000


@pytest.mark.parametrize("error", [LogFull("the log takes no more"), BrokerUnreachable("the broker is away")])
async def test_a_full_or_absent_broker_is_429_with_a_pause(service: Service, error: Exception) -> None:
    class Stuck(OpsLog):
        async def append(self, *_: Any, **__: Any) -> Any:
            raise error

    replica = await service.replica(log=Stuck(service.bus, service.group))
    async with client(replica.url, "tml-alice") as http:
        wire = Wire(http)
        answer = await wire.create_model(await wire.session())
    assert answer.status_code == 429
    assert 0 < float(answer.headers["retry-after"]) <= 60
    assert answer.json()["detail"] == str(error)
