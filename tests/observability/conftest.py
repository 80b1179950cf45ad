"""A real broker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from bus.connection import Bus, connect
from bus.embedded import EmbeddedBroker


@pytest.fixture
def broker(tmp_path) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path / "broker") as broker:
        yield broker


@pytest.fixture
async def bus(broker: EmbeddedBroker) -> AsyncIterator[Bus]:
    async with await connect(broker.url, broker.credentials, name="test") as bus:
        yield bus
