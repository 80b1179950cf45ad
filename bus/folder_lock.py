"""One broker per folder: a lock that the broker process holds together with its supervisor."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from bus.errors import BrokerError

_ORPHAN_S = 5.0
"""How long a broker whose parent was killed may take to go."""


class FolderInUse(BrokerError):
    """Another broker works on this folder."""


def take(folder: Path) -> int:
    """The lock's file descriptor; the lock lasts until every process that has it has closed it or ended.

    Raises FolderInUse: at once while the process that took it lives, else after a broker left behind had its time.
    """
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + _ORPHAN_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            owner = os.pread(lock, 32, 0).decode(errors="replace").strip()
            if _alive(owner) or time.monotonic() > deadline:
                os.close(lock)
                raise FolderInUse(
                    f"the folder {folder} is in use by process {owner or 'unknown'}: "
                    "stop it, or choose another folder"
                ) from None
            time.sleep(0.02)
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    return lock


def held(folder: Path) -> bool:
    """Whether a broker works on this folder. Leaves no trace, and an absent folder absent."""
    try:
        lock = os.open(folder / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
