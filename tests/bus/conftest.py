"""A real broker for every test, on a free port and a folder of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from bus.connection import Bus, connect
from bus.embedded import EmbeddedBroker
from bus.streams import ensure_streams
from tests.bus.proxy import Proxy

TENANTS = {"demo": "demo-password", "other": "other-password"}

UNSYNCED = "2m"
"""No test cuts the power, and a disk that others use too makes every synced write slow."""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path / "broker", TENANTS, sync_interval=UNSYNCED) as broker:
        yield broker


@pytest.fixture
async def bus(broker: EmbeddedBroker) -> AsyncIterator[Bus]:
    """A server's connection, with the streams in place."""
    async with await connect(broker.url, broker.credentials, name="test-server") as bus:
        await ensure_streams(bus)
        yield bus


@pytest.fixture
async def second_bus(broker: EmbeddedBroker, bus: Bus) -> AsyncIterator[Bus]:
    """Another server's connection."""
    async with await connect(broker.url, broker.credentials, name="test-server-2") as second:
        yield second


@pytest.fixture
async def demo_bus(broker: EmbeddedBroker, bus: Bus) -> AsyncIterator[Bus]:
    """The connection of the tenant `demo`."""
    credentials = broker.tenant_credentials("demo")
    async with await connect(broker.url, credentials, name="test-demo", uses_jetstream=False) as demo:
        yield demo


@pytest.fixture
async def proxy(broker: EmbeddedBroker) -> AsyncIterator[Proxy]:
    async with Proxy(broker.url) as proxy:
        yield proxy


@pytest.fixture
async def frail_bus(broker: EmbeddedBroker, bus: Bus, proxy: Proxy) -> AsyncIterator[Bus]:
    """A server's connection through the proxy, which can lose what the broker says."""
    async with await connect(proxy.url, broker.credentials, name="test-frail") as frail:
        yield frail
