"""API keys that `tinkerbus keys` gave out: who may use the service beside the tenants of the settings.

The file holds salted hashes, so that it gives no key away. It is replaced as a whole, and servers that run look for a
new one: a key works, or no longer works, within a second or two of the command.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from runtime import private_file
from runtime.private_file import KeyFileError

log = logging.getLogger(__name__)

FILE_NAME = "api_keys.json"
LOOK_EVERY_S = 1.0


class KeyRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    id: str
    """What people call it by."""
    tenant: str
    hash: str
    """sha256 of the file's salt and the key, in hex."""
    created_at: float
    """Seconds since 1970."""
    expires_at: float | None = None
    """Seconds since 1970; from then on nobody knows the key. None for never."""
    note: str = ""
    """For people to read."""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    salt: str
    keys: list[KeyRow] = []


class KeyRing:
    """The keys in one file, read anew when it changes. Picklable. Never prints a hash."""

    def __init__(self, file: Path) -> None:
        """Raises KeyFileError where the file cannot be used; one that is missing holds no keys."""
        self._file = file
        self._seen: tuple[int, ...] | None = None
        self._looked = float("-inf")
        self._salt = b""
        self._rows: dict[str, KeyRow] = {}
        self._look()

    def tenant_of(self, api_key: str) -> str | None:
        """The tenant a key belongs to, or None."""
        self._refresh()
        wanted = hashed(self._salt, api_key)
        row = self._rows.get(wanted)
        # What the look-up compares are hashes that nobody outside can aim at: its time tells nothing of a key.
        if row is None or not hmac.compare_digest(row.hash, wanted):
            return None
        return None if _over(row, time.time()) else row.tenant

    def rows(self) -> list[KeyRow]:
        """Oldest first."""
        self._refresh()
        return list(self._rows.values())

    def tenants(self) -> list[str]:
        """Everyone who has a key that is good."""
        now = time.time()
        return sorted({row.tenant for row in self.rows() if not _over(row, now)})

    def __getstate__(self) -> dict[str, Any]:
        """Another process has another clock, and looks at once."""
        return {**self.__dict__, "_looked": float("-inf")}

    def __repr__(self) -> str:
        return f"KeyRing(keys={len(self._rows)})"

    def _refresh(self) -> None:
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY_S:
            return
        self._looked = now
        try:
            self._look()
        except (KeyFileError, OSError) as error:
            log.warning("the keys stay as they were: %s", error)

    def _look(self) -> None:
        try:
            found = self._file.stat()
            seen = (found.st_ino, found.st_mtime_ns, found.st_size)
        except FileNotFoundError:
            self._seen, self._rows = None, {}
            return
        if seen != self._seen:
            read = _read(self._file)
            self._salt, self._rows = bytes.fromhex(read.salt), {row.hash: row for row in read.keys}
            self._seen = seen


def _over(row: KeyRow, now: float) -> bool:
    return row.expires_at is not None and row.expires_at <= now


def hashed(salt: bytes, api_key: str) -> str:
    return hashlib.sha256(salt + api_key.encode("utf-8", "surrogateescape")).hexdigest()


def add(file: Path, tenant: str, api_key: str, *, expires_at: float | None = None, note: str = "") -> KeyRow:
    """Write one more key down. Raises KeyFileError."""
    with _changing(file) as kept:
        row = KeyRow(
            id=f"k-{secrets.token_hex(4)}",
            tenant=tenant,
            hash=hashed(bytes.fromhex(kept.salt), api_key),
            created_at=time.time(),
            expires_at=expires_at,
            note=note,
        )
        kept.keys.append(row)
    return row


def revoke(file: Path, *, key_id: str | None = None, tenant: str | None = None) -> list[KeyRow]:
    """Strike out one key, or all of a tenant; what was struck out. Raises KeyFileError."""
    with _changing(file) as kept:
        gone = [row for row in kept.keys if row.id == key_id or row.tenant == tenant]
        kept.keys = [row for row in kept.keys if row not in gone]
    return gone


@contextlib.contextmanager
def _changing(file: Path) -> Iterator[_File]:
    """The file's content, written back at the end. One process at a time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_name(f".{file.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            kept = _read(file)
        except FileNotFoundError:
            kept = _File(salt=secrets.token_hex(16))
        before = msgspec.json.encode(kept)
        yield kept
        if (after := msgspec.json.encode(kept)) != before:
            private_file.replace(file, msgspec.json.format(after, indent=2) + b"\n")


def _read(file: Path) -> _File:
    """Raises FileNotFoundError, KeyFileError."""
    body = private_file.read(file)
    try:
        read = msgspec.json.decode(body, type=_File)
        bytes.fromhex(read.salt)
    except (msgspec.MsgspecError, ValueError) as error:
        raise KeyFileError(f"key file {file} is damaged: {error}") from error
    return read
