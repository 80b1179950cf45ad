"""The embedded broker's tenants follow the keys that are given out while it runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from bus.connection import BrokerError
from bus.embedded import EmbeddedBroker
from runtime import keys
from runtime.config import Settings

LOOK_EVERY_S = 1.0


@contextlib.contextmanager
def followed(
    settings: Settings, broker: EmbeddedBroker, say: Callable[[str], None], every_s: float = LOOK_EVERY_S
) -> Iterator[None]:
    """As long as the context lasts. Who has a key has a broker user. A tenant that comes or goes restarts the broker,
    for a moment: its clients connect again by themselves.
    """
    stopping = threading.Event()
    known = keys.load(settings).nats_passwords()
    said = ""

    def follow() -> None:
        nonlocal known, said
        while not stopping.wait(every_s):
            try:
                wanted = keys.load(settings).nats_passwords()
                if wanted != known:
                    broker.set_tenants(wanted)
                    known = wanted
            except (keys.KeyFileError, BrokerError, OSError) as error:
                if str(error) != said:
                    said = str(error)
                    say(f"the broker's tenants stay as they were: {error}")

    thread = threading.Thread(target=follow, name="broker-tenants", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()
