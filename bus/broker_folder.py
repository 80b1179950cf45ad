"""What the folder of an embedded broker tells: whether one runs there, on which port, with which password."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import NamedTuple

from bus import folder_lock
from bus.broker_config import SERVER_USER
from bus.connection import BrokerError, Credentials

PASSWORD_FILE = "server.password"
_WAIT_S = 20.0


class Endpoint(NamedTuple):
    url: str
    credentials: Credentials
    """The servers' own; tenants use their name and password."""


def find_running(data_dir: Path | str) -> Endpoint | None:
    """Where the broker that works on a folder serves, as its files say; None where none works on it.

    A broker that is just starting is waited for. Raises BrokerError when it does not come to serve, and when its
    password is not for us to read.
    """
    folder = Path(data_dir).absolute()
    deadline = time.monotonic() + _WAIT_S
    while _held(folder):
        for ports in folder.glob("*.ports"):
            port = port_in(ports)
            if port is not None:
                try:
                    password = (folder / PASSWORD_FILE).read_text().strip()
                except OSError as error:
                    raise BrokerError(
                        f"the broker's password in {error.filename} cannot be read: {error.strerror}"
                    ) from None
                return Endpoint(f"nats://127.0.0.1:{port}", Credentials(SERVER_USER, password))
        if time.monotonic() > deadline:
            raise BrokerError(f"the broker on {folder} does not serve: see {folder / 'nats.log'}")
        time.sleep(0.02)
    return None


def _held(folder: Path) -> bool:
    try:
        return folder_lock.held(folder)
    except OSError as error:
        raise BrokerError(f"the folder {folder} cannot be looked into: {error.strerror}") from None


def port_in(ports_file: Path) -> int | None:
    """The port in a ports file, or None while the broker writes it."""
    try:
        return int(str(json.loads(ports_file.read_text())["nats"][0]).rpartition(":")[2])
    except (FileNotFoundError, json.JSONDecodeError, KeyError, IndexError):
        return None
