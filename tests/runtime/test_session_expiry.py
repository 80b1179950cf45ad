"""Sessions without heartbeats end and free what they hold; none for our own absence, none with work in flight."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest

from bus.connection import BrokerUnreachable
from bus.tables import SampleRow, SamplerRow
from runtime.config import Sessions
from runtime.session_expiry import SessionExpiry, Silence
from tests.bus.waiting import until
from tests.runtime.ingress.conftest import Wire, client
from tests.runtime.stand_in import Replica, Service, running

AFTER_S = 1.0


def test_silence_is_counted_from_the_last_sign_of_life() -> None:
    silence = Silence(10)
    silence.began("a")
    silence.pass_time(6)
    silence.began("b")
    silence.heard("a")
    silence.pass_time(6)
    assert silence.due() == []
    silence.heard("b")
    silence.pass_time(4)
    assert silence.due() == ["a"]
    silence.ended("a")
    assert silence.due() == []


def test_a_session_that_is_seen_again_keeps_its_time_and_an_unknown_one_has_none() -> None:
    silence = Silence(10)
    silence.heard("never")
    silence.began("a")
    silence.pass_time(9)
    silence.began("a")
    silence.pass_time(1)
    assert silence.due() == ["a"]


@pytest.fixture
async def ingress(service: Service) -> Replica:
    return await service.replica(
        msgspec.structs.replace(service.settings, sessions=Sessions(expire_after_s=AFTER_S))
    )


@pytest.fixture
async def alice(ingress: Replica) -> AsyncIterator[Wire]:
    async with client(ingress.url, "tml-alice") as http:
        yield Wire(http)


def expiry(service: Service, replica: Replica, after_s: float = AFTER_S) -> SessionExpiry:
    return SessionExpiry(service.tables, service.log, replica.deps.admission, after_s)


async def heartbeat(alice: Wire, session: str) -> httpx.Response:
    return await alice.post("session_heartbeat", {"session_id": session})


async def status(service: Service, session: str) -> tuple[str, str | None]:
    found = await service.tables.sessions.get(session)
    assert found is not None
    return found[0].status, found[0].reason


async def test_a_silent_session_ends_and_frees_its_model_and_samplers(
    alice: Wire, ingress: Replica, service: Service
) -> None:
    session, beating = await alice.session(), await alice.session()
    model = (await alice.result(await alice.create_model(session))).json()["model_id"]
    await service.tables.samplers.put(
        f"{session}:sample:0",
        SamplerRow(tenant="alice", base_model="tiny", created_at=time.time(), session_id=session),
    )
    async with running(expiry(service, ingress).run()):
        async with asyncio.timeout(20):
            while (await status(service, session))[0] == "live":
                assert (await heartbeat(alice, beating)).status_code == 200
                await asyncio.sleep(0.1)
        await alice.settled(f"{model}#end")
    assert await status(service, session) == ("finished", "expired")
    assert await service.tables.samplers.get(f"{session}:sample:0") is None
    assert service.dispatcher.ran[-1] == (model, None, "unload_model")
    assert (await heartbeat(alice, session)).status_code == 410
    sampler = await alice.http.get(f"/api/v1/samplers/{session}:sample:0")
    assert sampler.status_code == 410
    assert (await heartbeat(alice, beating)).status_code == 200


async def test_a_session_with_work_in_flight_lives_until_it_is_done(
    alice: Wire, ingress: Replica, service: Service
) -> None:
    session = await alice.session()
    model = (await alice.result(await alice.create_model(session))).json()["model_id"]
    service.dispatcher.go.clear()
    step = await alice.optim_step(model, 1)
    async with running(expiry(service, ingress, 0.4).run()):
        await asyncio.sleep(1.5)
        assert (await status(service, session))[0] == "live"
        service.dispatcher.go.set()
        assert (await alice.result(step)).status_code == 200
        await until(lambda: _ended(service, session))


async def test_a_session_that_samples_lives_until_it_is_done(
    alice: Wire, ingress: Replica, service: Service
) -> None:
    session = await alice.session()
    sampler = f"{session}:sample:0"
    await service.tables.samplers.put(
        sampler, SamplerRow(tenant="alice", base_model="tiny", created_at=time.time(), session_id=session)
    )
    await service.tables.samples.put((sampler, "1"), SampleRow(tenant="alice", process="p"))
    async with running(expiry(service, ingress, 0.4).run()):
        await asyncio.sleep(1.2)
        assert (await status(service, session))[0] == "live"
        await service.tables.samples.forget((sampler, "1"))
        await until(lambda: _ended(service, session))


async def _ended(service: Service, session: str) -> bool:
    return (await status(service, session))[0] == "finished"


async def test_the_time_in_which_the_broker_cannot_be_asked_does_not_count(
    alice: Wire, ingress: Replica, service: Service
) -> None:
    session = await alice.session()
    part = expiry(service, ingress, 0.6)
    real, away = part._tables.heartbeats.since, True

    async def since(position: int) -> object:
        if away:
            raise BrokerUnreachable("away")
        return await real(position)

    part._tables.heartbeats.since = since  # type: ignore[method-assign, assignment]
    async with running(part.run()):
        await asyncio.sleep(1.2)
        assert (await status(service, session))[0] == "live"
        away = False
        await asyncio.sleep(0.3)
        assert (await status(service, session))[0] == "live"
        await until(lambda: _ended(service, session))


async def test_a_new_start_counts_anew(alice: Wire, ingress: Replica, service: Service) -> None:
    session = await alice.session()
    for _ in range(4):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(expiry(service, ingress).run(), 0.4)
    assert (await status(service, session))[0] == "live"


async def test_without_a_limit_nobody_ends_and_nothing_is_written(alice: Wire, service: Service) -> None:
    settings = msgspec.structs.replace(service.settings, sessions=Sessions(expire_after_s=0))
    replica = await service.replica(settings)
    async with client(replica.url, "tml-alice") as http:
        session = await alice.session()
        assert (await heartbeat(Wire(http), session)).status_code == 200
    assert await service.tables.heartbeats.get(session) is None


async def test_many_heartbeats_are_few_writes(alice: Wire, service: Service) -> None:
    session = await alice.session()
    _, before = await service.tables.heartbeats.since(0)
    for _ in range(10):
        await heartbeat(alice, session)
    changed, _ = await service.tables.heartbeats.since(before)
    _, after = await service.tables.heartbeats.since(0)
    assert list(changed) == [session]
    assert after - before < 5


async def test_a_model_that_its_finished_session_left_behind_is_unloaded(
    alice: Wire, ingress: Replica, service: Service
) -> None:
    session = await alice.session()
    model = (await alice.result(await alice.create_model(session))).json()["model_id"]
    await service.tables.sessions.change(
        session, lambda row: msgspec.structs.replace(row, status="finished", reason="success")
    )
    async with running(expiry(service, ingress).run()):
        await alice.settled(f"{model}#end")
