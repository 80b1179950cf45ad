from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from bus import folder_lock
from bus.broker_folder import Endpoint, find_running
from bus.connection import Credentials
from bus.embedded import EmbeddedBroker


def test_a_running_broker_is_found_by_its_folder(broker: EmbeddedBroker) -> None:
    assert find_running(broker.data_dir) == (broker.url, broker.credentials)
    broker.restart(kill=True)
    assert find_running(broker.data_dir) == (broker.url, broker.credentials)
    broker.stop()
    assert find_running(broker.data_dir) is None


def test_a_broker_that_is_just_starting_is_waited_for(tmp_path: Path) -> None:
    """The folder is taken before the broker serves."""
    lock = folder_lock.take(tmp_path)
    found: list[Endpoint | None] = []
    looking = threading.Thread(target=lambda: found.append(find_running(tmp_path)))
    looking.start()
    time.sleep(0.2)
    assert looking.is_alive()
    (tmp_path / "server.password").write_text("secret\n")
    (tmp_path / "nats-server_1.ports").write_text('{"nats": ["nats://127.0.0.1:4321"]}')
    looking.join()
    os.close(lock)
    assert found == [Endpoint("nats://127.0.0.1:4321", Credentials("tinkerbus", "secret"))]


def test_looking_for_a_broker_makes_nothing(tmp_path: Path) -> None:
    assert find_running(tmp_path / "absent") is None
    assert find_running(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
