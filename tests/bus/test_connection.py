from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from nats.js.errors import BadRequestError, ServerError, ServiceUnavailableError

from bus.connection import (
    BrokerError,
    BrokerTooOld,
    BrokerUnreachable,
    Bus,
    Credentials,
    MessageTooLarge,
    NoJetStream,
    NotAllowed,
    WrongCredentials,
    connect,
)
from bus.embedded import EmbeddedBroker, find_nats_server
from bus.streams import ensure_streams
from tests.bus.proxy import Proxy


@asynccontextmanager
async def greeter(version: str) -> AsyncIterator[str]:
    """A server that introduces itself as nats-server of `version`, and answers PING."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info = {
            "server_id": "x",
            "version": version,
            "jetstream": True,
            "max_payload": 1 << 20,
            "headers": True,
        }
        writer.write(b"INFO " + json.dumps(info).encode() + b"\r\n")
        while line := await reader.readline():
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    try:
        yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def refusal(url: str, credentials: Credentials | None = None) -> BrokerError:
    with pytest.raises(BrokerError) as caught:
        await connect(url, credentials, name="test", timeout_s=10)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None
    return caught.value


async def test_a_broker_that_is_not_there_is_named_quickly_and_without_noise(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    with caplog.at_level(logging.DEBUG):
        error = await refusal("nats://user:secret@127.0.0.1:1")
    assert isinstance(error, BrokerUnreachable)
    assert str(error).startswith("no NATS broker answers at nats://127.0.0.1:1: ")
    assert time.monotonic() - began < 15
    assert not [record for record in caplog.records if record.name.startswith("nats")]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("url", ["foo:bar:baz", "127.0.0.1:4222", "http://x", "nats://"])
async def test_what_is_no_address_is_said_to_be_none(url: str) -> None:
    assert "is no broker address" in str(await refusal(url))


async def test_wrong_credentials_name_the_user_and_not_the_password(broker: EmbeddedBroker) -> None:
    error = await refusal(broker.url, Credentials("demo", "guess"))
    assert isinstance(error, WrongCredentials)
    assert "refuses user 'demo'" in str(error)
    assert "guess" not in str(error) + repr(Credentials("demo", "guess"))
    assert "without credentials" in str(await refusal(broker.url))


async def test_a_broker_that_is_too_old_is_refused_with_both_versions() -> None:
    async with greeter("2.9.25") as url:
        error = await refusal(url)
    assert isinstance(error, BrokerTooOld)
    assert "is nats-server 2.9.25; tinkerbus needs 2.11 or newer" in str(error)


@pytest.fixture
def plain_url(tmp_path: Path) -> Iterator[str]:
    """A nats-server as it starts without any option: no JetStream."""
    command = [find_nats_server(), "-a", "127.0.0.1", "-p", "-1", "--ports_file_dir", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        ports = tmp_path / f"nats-server_{process.pid}.ports"
        deadline = time.monotonic() + 10
        while not ports.exists() or not ports.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield json.loads(ports.read_text())["nats"][0]
        process.terminate()


async def test_a_broker_without_jetstream_is_refused(plain_url: str) -> None:
    error = await refusal(plain_url)
    assert isinstance(error, NoJetStream)
    assert "start nats-server with -js" in str(error)


async def test_an_account_without_jetstream_is_refused_as_a_server(broker: EmbeddedBroker) -> None:
    error = await refusal(broker.url, broker.tenant_credentials("demo"))
    assert isinstance(error, NotAllowed)
    assert "may not use JetStream" in str(error)


async def test_streams_are_made_once_and_their_limits_brought_up_to_date(bus: Bus) -> None:
    await ensure_streams(bus, results_ttl_s=60, submit_max_msgs_per_model=3)
    await ensure_streams(bus, results_ttl_s=60, submit_max_msgs_per_model=3)
    results = await bus.js.stream_info("TINKER_RESULTS")
    assert results.config.max_age == 60
    assert (await bus.js.stream_info("TINKER_SUBMIT")).config.max_msgs_per_subject == 3


async def test_the_largest_message_passes_and_one_above_leaves_the_connection_alone(bus: Bus) -> None:
    assert bus.max_payload == 8 * 2**20
    bus.check_size(bytes(bus.max_payload - 1024), "it")
    with pytest.raises(MessageTooLarge, match="it has 8388608 bytes; the broker takes 8387584"):
        bus.check_size(bytes(bus.max_payload), "it")


async def test_a_question_on_a_broken_connection_ends_with_the_reconnection_not_with_its_time(
    frail_bus: Bus, proxy: Proxy
) -> None:
    proxy.muted = True
    question = asyncio.create_task(frail_bus.request("$JS.API.INFO", b"", timeout_s=30))
    await asyncio.sleep(0.1)
    proxy.muted = False
    began = time.monotonic()
    proxy.cut()
    with pytest.raises(BrokerUnreachable, match="did not answer"):
        await question
    assert time.monotonic() - began < 15
    assert await frail_bus.request("$JS.API.INFO", b"", timeout_s=5)


async def test_closing_is_quick_also_while_the_broker_is_away(frail_bus: Bus, proxy: Proxy) -> None:
    proxy._server.close()
    proxy.cut()
    await asyncio.sleep(0.1)
    began = time.monotonic()
    await frail_bus.close()
    await frail_bus.close()
    assert time.monotonic() - began < 15


async def test_what_jetstream_cannot_do_now_may_be_tried_again(bus: Bus) -> None:
    full = ServerError(code=500, description="no space left on device", err_code=10000)
    away = ServiceUnavailableError(code=503, description="JetStream not enabled", err_code=10039)
    for error in (full, away):
        assert isinstance(bus.refusal("table x", error), BrokerUnreachable)
        assert str(error.description) in str(bus.refusal("table x", error))
    wrong = BadRequestError(code=400, description="invalid name", err_code=10052)
    assert not isinstance(bus.refusal("table x", wrong), BrokerUnreachable)
    assert str(bus.refusal("table x", wrong)) == "the broker refuses table x: invalid name"
