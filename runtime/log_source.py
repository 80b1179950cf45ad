"""Where `tinkerbus log` looks: the operator's broker, or the embedded one of a data folder, running or not."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from bus.broker_folder import find_running
from bus.connection import BrokerError, Bus, Credentials, connect
from bus.embedded import EmbeddedBroker
from runtime.config import Settings
from runtime.log_view import LogView
from runtime.service import BROKER_FOLDER, GROUP


@contextlib.asynccontextmanager
async def opened(settings: Settings, *, waits: bool = False) -> AsyncIterator[LogView]:
    """The log that a service with these settings writes.

    Where no service runs on the data folder, its broker is started for as long as the context lasts, unless the
    caller `waits` for what a service would write. Raises BrokerError and NotThere, each with one clear line.
    """
    async with connected(settings, waits=waits) as bus:
        yield await LogView.open(bus, GROUP)


@contextlib.asynccontextmanager
async def connected(settings: Settings, *, waits: bool = False) -> AsyncIterator[Bus]:
    """The broker of a service with these settings, as `opened` finds it."""
    with broker(settings, waits=waits) as (url, credentials):
        async with await connect(url, credentials, name="log") as bus:
            yield bus


@contextlib.contextmanager
def broker(settings: Settings, *, waits: bool = False) -> Iterator[tuple[str, Credentials | None]]:
    nats = settings.nats
    if nats.url is not None:
        yield nats.url, Credentials(nats.user, nats.password or "") if nats.user else None
        return
    data = Path(settings.data)
    folder = data / BROKER_FOLDER
    running = find_running(folder)
    if running is not None:
        yield running
        return
    if not (folder / "streams").is_dir():
        raise BrokerError(
            f"{data} holds no log: name the data folder of a service, or a broker with --nats URL"
        )
    if waits:
        raise BrokerError(f"no service runs on {data}: there is nothing to wait for")
    broker = EmbeddedBroker(folder)
    try:
        endpoint = broker.start()
    except OSError as error:
        raise BrokerError(f"the broker of {data} cannot be started: {error}") from None
    try:
        yield endpoint
    finally:
        broker.stop()
