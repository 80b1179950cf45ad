"""A broker whose disk is full: it says so, keeps what it acknowledged, and stores again once there is room."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bus import broker_health, embedded
from bus.broker_health import LONGEST_S, SHORTEST_S, WELL_S, Mending, Silence, ask
from bus.connection import BrokerError, connect
from bus.embedded import EmbeddedBroker
from bus.log import OpsLog, entry
from bus.streams import ensure_streams
from bus.tables import GroupRow, Tables
from tests.bus.conftest import UNSYNCED
from tests.bus.waiting import until
from tests.support.small_disk import SmallDisk, mounted

ROOM = 16 * 2**20
FULL = "JetStream stream 'X' write error: no space left on device"


def test_a_broker_that_is_well_is_left_alone() -> None:
    mending = Mending(ROOM)
    assert not any(mending.due(None, 0, now) for now in range(100))


def test_one_complaint_alone_is_no_reason() -> None:
    mending = Mending(ROOM)
    assert not any(mending.due(FULL if now % 2 else None, ROOM, now) for now in range(100))


def test_without_room_it_is_not_restarted_and_with_room_it_is() -> None:
    mending = Mending(ROOM)
    assert not any(mending.due(FULL, ROOM - 1, now) for now in range(1000))
    assert mending.due(FULL, ROOM, 1000)


def test_restarts_that_do_not_help_become_seldom() -> None:
    mending = Mending(ROOM)
    restarts = [now for now in range(1000) if mending.due(FULL, ROOM, now)]
    pauses = [later - earlier for earlier, later in itertools.pairwise(restarts)]
    assert pauses == sorted(pauses)
    assert pauses[0] <= 2 * SHORTEST_S
    assert set(pauses[-5:]) == {LONGEST_S}


def test_after_one_that_helped_the_next_comes_soon_again() -> None:
    mending = Mending(ROOM)
    last = max(now for now in range(1000) if mending.due(FULL, ROOM, now))
    well = last + WELL_S
    assert not mending.due(None, ROOM, well)
    restarts = [now for now in range(1000, 1100) if mending.due(FULL, ROOM, now)]
    assert restarts[0] == 1001
    assert restarts[1] - restarts[0] <= 2 * SHORTEST_S * 2


def test_a_broker_hangs_after_two_questions_in_a_row_without_an_answer() -> None:
    silence = Silence()
    assert [silence.hangs(1, answered=answered) for answered in (False, True, False, False, False)] == [
        *(False, False, False, True, True)
    ]


def test_what_an_earlier_life_left_unanswered_does_not_count() -> None:
    silence = Silence()
    assert not silence.hangs(1, answered=False)
    assert not silence.hangs(2, answered=False)
    assert silence.hangs(2, answered=False)


async def test_a_broker_that_is_stopped_and_does_not_come_back_is_killed_and_started_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shorter stop is waited out: what was stored is there, and clients reconnect by themselves."""
    monkeypatch.setattr(embedded, "HEALTH_S", 0.1)
    monkeypatch.setattr(broker_health, "ANSWER_S", 1.0)
    said: list[str] = []
    with EmbeddedBroker(tmp_path, sync_interval=UNSYNCED, say=said.append) as broker:
        async with await connect(broker.url, broker.credentials, name="test") as bus:
            await ensure_streams(bus)
            ops = OpsLog(bus, "g")
            await ops.append(entry("t", "m", 1, "forward_backward", b"y"))
            pid = broker.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(1.2)
            os.kill(pid, signal.SIGCONT)
            await ops.append(entry("t", "m", 2, "forward_backward", b"y"))
            await asyncio.sleep(0.5)
            assert (broker.starts, said) == (1, [])

            os.kill(pid, signal.SIGSTOP)
            await until(lambda: broker.starts == 2, 20)
            assert broker.pid != pid
            await ops.append(entry("t", "m", 3, "forward_backward", b"y"))
            assert [one.seq_id async for one in ops.so_far()] == [1, 2, 3]
    assert said == ["the broker lives and does not answer, 2 times for 1 s: killing it, and starting it anew"]


def test_a_running_broker_says_that_it_is_well_to_its_supervisor_alone(broker: EmbeddedBroker) -> None:
    port = int(broker.url.rpartition(":")[2])
    assert ask(port, broker._config.supervisor_password) is None
    with pytest.raises(OSError, match="refuses its supervisor: -ERR 'Authorization Violation'"):
        ask(port, "a guess")


def test_what_does_not_answer_is_an_error_of_the_network(broker: EmbeddedBroker) -> None:
    del broker
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with pytest.raises(OSError):  # noqa: PT011 - whichever of them
            broker_health.ask(silent.getsockname()[1], "x", timeout_s=0.1)
        assert time.monotonic() - began < 5


def test_no_tenant_may_take_the_supervisors_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tenant 'tinkerbus-supervisor': choose another name"):
        EmbeddedBroker(tmp_path, {"tinkerbus-supervisor": "x"})


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with mounted(tmp_path / "disk", 40 * 2**20) as disk:
        yield disk


async def test_a_full_disk_loses_nothing_and_with_room_the_broker_stores_again(
    disk: SmallDisk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(embedded, "HEALTH_S", 0.1)
    caplog.set_level(logging.WARNING, "bus.embedded")
    with EmbeddedBroker(disk.folder / "nats", sync_interval=UNSYNCED) as broker:
        async with await connect(broker.url, broker.credentials, name="test") as bus:
            await ensure_streams(bus)
            tables, ops = await Tables.open(bus), OpsLog(bus, "g")
            stored = await filled(disk, ops)
            row = GroupRow(status="ready", base_model="m", model_dir="d", context_length=1, vocab_size=1)
            await until(lambda: broker.complaint is not None)
            assert "no space left on device" in str(broker.complaint)
            with pytest.raises(BrokerError):
                await ops.append(entry("t", "m", stored, "forward_backward", b"y"), timeout_s=0.5)
            assert (await ops.get("m", stored - 1)) is not None  # what is there can be read
            await asyncio.sleep(1)
            assert broker.starts == 1
            assert disk.free < ROOM

            disk.make_room()
            await until(lambda: broker.starts == 2 and broker.complaint is None, 20)
            for number in range(stored, stored + 3):
                await ops.append(entry("t", "m", number, "forward_backward", b"y"))
            await tables.groups.put("g", row)
            assert [await ops.holds("m", number) for number in range(1, stored + 3)] == [True] * (stored + 2)
            assert [one.seq_id async for one in ops.so_far()] == list(range(1, stored + 3))
    said = [record.getMessage() for record in caplog.records]
    assert [line.partition(":")[0].partition(",")[0] for line in said] == [
        "the broker cannot store",
        "restarting the broker",
        "the broker stores again",
    ]


async def filled(disk: SmallDisk, ops: OpsLog) -> int:
    """Append until the disk takes no more; the number that was not stored."""
    disk.fill(leave=1_500_000)
    for number in range(1, 100):
        try:
            body = number.to_bytes(1, "little") * 100_000
            await ops.append(entry("t", "m", number, "forward_backward", body), timeout_s=0.5)
        except BrokerError:
            return number
    raise AssertionError("the disk was never full")
