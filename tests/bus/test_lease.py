"""One dispatcher at a time acts for a group, whoever sleeps, dies or wakes up."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from bus import lease
from bus.connection import Bus
from bus.embedded import EmbeddedBroker
from bus.lease import Lease, LeaseLost, LeaseRow
from bus.publish import StreamFull
from bus.tables import Table

LEASE_S = 0.6


@pytest.fixture
async def leases(bus: Bus) -> Table[LeaseRow]:
    return await lease.open_leases(bus)


async def acquired(leases: Table[LeaseRow], holder: str) -> Lease:
    async with asyncio.timeout(20):
        return await Lease.acquire(leases, "main", holder, LEASE_S)


async def test_each_holder_has_a_higher_epoch(leases: Table[LeaseRow]) -> None:
    for epoch in (1, 2, 3):
        held = await acquired(leases, f"holder-{epoch}")
        assert held.epoch == epoch
        await held.release()


async def test_nobody_gets_it_while_its_holder_keeps_it(leases: Table[LeaseRow]) -> None:
    held = await acquired(leases, "first")
    keeping = asyncio.create_task(held.keep())
    waiting = asyncio.create_task(acquired(leases, "second"))
    await asyncio.sleep(4 * LEASE_S)
    assert not waiting.done()
    assert not keeping.done()
    keeping.cancel()
    assert (await waiting).epoch == 2


async def test_a_dead_holder_is_replaced_after_the_leases_time_and_no_sooner(
    leases: Table[LeaseRow],
) -> None:
    await acquired(leases, "dead")
    before = time.monotonic()
    await acquired(leases, "next")
    assert time.monotonic() - before >= LEASE_S


async def test_a_holder_keeps_it_over_a_broker_without_room(
    leases: Table[LeaseRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = await acquired(leases, "first")
    keeping = asyncio.create_task(held.keep())
    asked = []

    async def no_room(*_: object) -> None:
        asked.append(time.monotonic())
        raise StreamFull("a row is refused: insufficient resources")

    with monkeypatch.context() as full:
        full.setattr(leases, "update", no_room)
        await asyncio.sleep(2 * LEASE_S)
        confirming = asyncio.create_task(held.confirm())
        await asyncio.sleep(LEASE_S)
        assert not confirming.done()  # nobody may act on a lease that cannot be renewed
        assert len(asked) < 50
    await asyncio.wait_for(confirming, 10)
    assert not keeping.done()
    keeping.cancel()


async def test_a_holder_that_wakes_up_after_another_took_over_must_not_act(leases: Table[LeaseRow]) -> None:
    sleeper = await acquired(leases, "sleeper")
    await sleeper.confirm()
    second = await acquired(leases, "second")  # takes LEASE_S, in which the sleeper renews nothing
    with pytest.raises(LeaseLost, match="epoch 1"):
        await sleeper.confirm()
    with pytest.raises(LeaseLost):
        await sleeper.keep()
    await sleeper.release()  # does not touch what is another's
    await second.confirm()
    row = await leases.get("main")
    assert row is not None
    assert row[0].holder == "second"


async def test_a_holder_that_wakes_up_and_finds_the_row_as_it_left_it_goes_on(
    leases: Table[LeaseRow],
) -> None:
    sleeper = await acquired(leases, "sleeper")
    await asyncio.sleep(2 * LEASE_S)
    await sleeper.confirm()
    assert sleeper.epoch == 1


async def test_of_two_that_wait_one_gets_it(leases: Table[LeaseRow]) -> None:
    await acquired(leases, "dead")
    both = [asyncio.create_task(acquired(leases, name)) for name in ("a", "b")]
    done, pending = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    assert len(done) == 1
    keeping = asyncio.create_task(done.pop().result().keep())
    await asyncio.sleep(3 * LEASE_S)
    assert not pending.pop().done()
    keeping.cancel()


async def test_one_that_is_freed_need_not_be_waited_for(leases: Table[LeaseRow]) -> None:
    await acquired(leases, "killed")
    await lease.free(leases, "main")
    waiting = Lease.acquire(leases, "main", "next", 1000.0)
    async with asyncio.timeout(20):
        assert (await waiting).epoch == 2


async def test_whoever_takes_over_is_told_from_whom(leases: Table[LeaseRow]) -> None:
    first = await acquired(leases, "first")
    assert first.predecessor == ""
    second = await acquired(leases, "second")
    assert second.predecessor == "first"
    await second.release()
    assert (await acquired(leases, "third")).predecessor == ""


async def test_a_lease_that_is_kept_ends_what_is_done_under_it_when_it_is_lost(
    leases: Table[LeaseRow],
) -> None:
    held = await acquired(leases, "first")

    async def work() -> None:
        async with asyncio.timeout(20), held.kept():
            await leases.put("main", LeaseRow(holder="another", epoch=2))
            await asyncio.Event().wait()

    with pytest.raises(LeaseLost):
        await work()


async def test_what_is_done_under_a_lease_that_is_kept_raises_its_own_errors(leases: Table[LeaseRow]) -> None:
    held = await acquired(leases, "first")
    with pytest.raises(ZeroDivisionError):
        async with held.kept():
            raise ZeroDivisionError
    async with held.kept():
        await asyncio.sleep(2 * LEASE_S)
    await held.confirm()
    row = await leases.get("main")
    assert row is not None
    assert row[0].beat > 2


async def test_the_time_in_which_the_broker_was_away_does_not_count_against_the_holder(
    broker: EmbeddedBroker, leases: Table[LeaseRow], second_bus: Bus
) -> None:
    held = await acquired(leases, "first")
    waiting = asyncio.create_task(
        Lease.acquire(await lease.open_leases(second_bus), "main", "second", LEASE_S)
    )
    await asyncio.sleep(LEASE_S / 2)
    assert broker.pid is not None
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(3 * LEASE_S)
    finally:
        os.kill(broker.pid, signal.SIGCONT)
    async with held.kept():
        await asyncio.sleep(3 * LEASE_S)
        assert not waiting.done()
    waiting.cancel()
