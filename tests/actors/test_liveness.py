"""A rank that is stopped, rather than dead, is noticed; a group that hangs because of it is killed."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from actors import liveness
from actors.contract import AdapterConfig, EngineConfig
from actors.group import GroupConfig, GroupDied, MegatronGroup
from actors.layout import Layout
from actors.liveness import Liveness
from bus.events import AdamParams
from tests.support.requests import random_request


@pytest_asyncio.fixture
async def ear() -> AsyncIterator[Liveness]:
    opened = await Liveness.open("127.0.0.1", 2)
    yield opened
    opened.close()


async def watched(ear: Liveness, timeout_s: float, for_s: float) -> list[str]:
    lost: list[str] = []
    watch = asyncio.create_task(ear.watch(timeout_s, lost.append))
    await asyncio.wait([watch], timeout=for_s)
    watch.cancel()
    return lost


async def test_ranks_that_beat_are_not_lost(ear: Liveness) -> None:
    for rank in (0, 1):
        liveness.beat(ear.address, rank)
    assert await watched(ear, 2.5, for_s=4) == []


async def test_one_that_is_silent_is_named(ear: Liveness) -> None:
    liveness.beat(ear.address, 0)
    assert await watched(ear, 2.5, for_s=10) == ["rank 1 gave no sign of life for 2.5 s"]


async def test_datagrams_of_others_do_not_count(ear: Liveness) -> None:
    liveness.beat(ear.address, 0)
    liveness.beat(dataclasses.replace(ear.address, token="guessed"), 1)
    liveness.beat(ear.address, 7)
    ear.datagram_received(b"\xff not a beat", None)
    assert await watched(ear, 2.5, for_s=10) == ["rank 1 gave no sign of life for 2.5 s"]


async def test_when_the_listener_itself_was_stopped_nobody_is_lost(ear: Liveness) -> None:
    for rank in (0, 1):
        liveness.beat(ear.address, rank)

    def sleep_in_the_loop() -> None:
        time.sleep(4)  # as if the process had been stopped

    asyncio.get_running_loop().call_later(0.5, sleep_in_the_loop)
    assert await watched(ear, 2.5, for_s=7) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_stopped_rank_ends_the_group_and_no_process_is_left(
    ray_cluster: None, small_folder: Path
) -> None:
    config = GroupConfig(EngineConfig(small_folder, Layout(dp=2)), heartbeat_timeout_s=3)
    group = await MegatronGroup.start(config)
    try:
        processes = [psutil.Process(pid) for pid in await group.process_ids()]
        await group.create("m", AdapterConfig(rank=4, alpha=32, seed=1))
        os.kill(processes[1].pid, signal.SIGSTOP)
        call = group.forward_backward("m", random_request((3, 5)))
        step = group.optim_step("m", AdamParams())
        for operation in (call, step):
            with pytest.raises(GroupDied):
                await asyncio.wait_for(operation, 60)
        with pytest.raises(GroupDied):
            await asyncio.wait_for(group.optim_step("m", AdamParams()), 60)
    finally:
        group.close()
    gone, alive = psutil.wait_procs(processes, timeout=10)
    assert len(gone) == 2
    assert alive == []
