"""A real broker for all tests of this folder, and a service around it for each."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from bus.connection import connect
from bus.embedded import EmbeddedBroker
from bus.ledger import Ledger
from bus.log import OpsLog
from bus.results import Results
from bus.streams import ensure_streams
from bus.tables import Tables
from runtime.config import Client, Http, Settings, Tenant
from runtime.keys import Keys
from tests.runtime.stand_in import Service, StandInDispatcher, running

ALICE, BOB = "alice", "bob"
TENANTS = {
    ALICE: Tenant(api_keys=("tml-alice",), nats_password="alice-password"),
    BOB: Tenant(api_keys=("tml-bob",), nats_password="bob-password"),
}
PASSWORDS = {name: str(row.nats_password) for name, row in TENANTS.items()}


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path_factory.mktemp("broker"), PASSWORDS) as started:
        yield started


@pytest.fixture
async def service(
    broker: EmbeddedBroker, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Service]:
    """Its parameter is how long a poll is held, in seconds."""
    async with service_on(broker, tmp_path, long_poll_s=getattr(request, "param", 0.3)) as started:
        yield started


@contextlib.asynccontextmanager
async def service_on(
    broker: EmbeddedBroker, folder: Path, *, long_poll_s: float = 0.3
) -> AsyncIterator[Service]:
    settings = Settings(
        data=str(folder),
        http=Http(long_poll_s=long_poll_s),
        client=Client(fwdbwd_max_chunk_len=2, use_pyqwest_transport=False),
        tenants=TENANTS,
    )
    async with contextlib.AsyncExitStack() as stack:
        bus = await connect(broker.url, broker.credentials, name="test")
        stack.push_async_callback(bus.close)
        await ensure_streams(bus)
        log = OpsLog(bus, f"group-{secrets.token_hex(4)}")
        tables, results, ledger = await Tables.open(bus), Results(bus), await Ledger.open(bus, log.group)
        dispatcher = StandInDispatcher(log, results, tables, ledger)
        await dispatcher.announce()
        await stack.enter_async_context(running(dispatcher.run()))
        yield Service(
            broker_url=broker.url,
            credentials=broker.credentials,
            settings=settings,
            keys=Keys(TENANTS),
            group=log.group,
            bus=bus,
            log=log,
            results=results,
            tables=tables,
            ledger=ledger,
            dispatcher=dispatcher,
            stack=stack,
        )
        dispatcher.go.set()
        await asyncio.sleep(0)
