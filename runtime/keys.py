"""Who a request comes from: API keys of the SDK, passwords of the tenants' broker users.

Keys come from the settings; what they leave out is made once and kept in the data folder, readable by its
owner alone, so that a restart accepts the same keys. Picklable: every ingress replica gets a copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import tempfile
from pathlib import Path

import msgspec

from runtime.config import DEFAULT_TENANT, KEY_PREFIX, Settings, Tenant

FILE_NAME = "keys.json"
SECRET_NAME = "download.key"


class KeyFileError(ValueError):
    """The key file in the data folder is not one of ours, or is open to others."""


class _Made(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What was made for one tenant."""

    api_key: str | None = None
    nats_password: str | None = None


class Keys:
    """The keys of all tenants. Never printed."""

    def __init__(self, tenants: dict[str, Tenant], secret: bytes | None = None) -> None:
        self._tenants = {_digest(key): name for name, row in tenants.items() for key in row.api_keys}
        self._first = {name: row.api_keys[0] for name, row in tenants.items()}
        self._passwords = {name: row.nats_password or "" for name, row in tenants.items()}
        self.secret = secret or secrets.token_bytes(32)
        """What download URLs are signed with; the same at every ingress."""

    def tenant_of(self, api_key: str) -> str | None:
        """The tenant a key belongs to, or None. Digests are compared: the time taken tells nothing."""
        return self._tenants.get(_digest(api_key))

    def api_key(self, tenant: str) -> str:
        """A key the tenant can use: its first."""
        return self._first[tenant]

    def nats_password(self, tenant: str) -> str:
        """The password of the tenant's broker user."""
        return self._passwords[tenant]

    def nats_passwords(self) -> dict[str, str]:
        """By tenant: what an embedded broker is started with."""
        return dict(self._passwords)

    def __repr__(self) -> str:
        return f"Keys(tenants={sorted(self._passwords)})"


def load(settings: Settings) -> Keys:
    """The keys of this service; makes and keeps what the settings leave out.

    Raises KeyFileError where the kept file cannot be used.
    """
    file = Path(settings.data) / FILE_NAME
    made = _read(file)
    before = msgspec.json.encode(made)
    tenants: dict[str, Tenant] = {}
    for name, row in (settings.tenants or {DEFAULT_TENANT: Tenant()}).items():
        kept = made.setdefault(name, _Made())
        if not row.api_keys and kept.api_key is None:
            kept.api_key = KEY_PREFIX + secrets.token_urlsafe(24)
        if row.nats_password is None and kept.nats_password is None:
            kept.nats_password = secrets.token_urlsafe(24)
        tenants[name] = Tenant(
            api_keys=row.api_keys or ((kept.api_key,) if kept.api_key else ()),
            nats_password=row.nats_password or kept.nats_password,
        )
    if msgspec.json.encode(made) != before:
        _write(file, made)
    return Keys(tenants, _secret(file.with_name(SECRET_NAME)))


def _secret(file: Path) -> bytes:
    """Made once: a URL that was signed before a restart is good after it."""
    with contextlib.suppress(FileNotFoundError):
        return bytes.fromhex(_private(file).decode("ascii", "replace").strip())
    secret = secrets.token_bytes(32)
    _replace(file, secret.hex().encode() + b"\n")
    return secret


def _private(file: Path) -> bytes:
    """What is in a file that its owner alone may read. Raises FileNotFoundError, KeyFileError."""
    body = file.read_bytes()
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode & 0o077:
        raise KeyFileError(f"key file {file} has mode {mode:04o}: others may read it; chmod it to 0600")
    return body


def _read(file: Path) -> dict[str, _Made]:
    try:
        body = _private(file)
    except FileNotFoundError:
        return {}
    try:
        return msgspec.json.decode(body, type=dict[str, _Made])
    except msgspec.MsgspecError as error:
        raise KeyFileError(f"key file {file} is damaged: {error}; remove it to have new keys made") from error


def _write(file: Path, made: dict[str, _Made]) -> None:
    _replace(file, msgspec.json.format(msgspec.json.encode(made), indent=2) + b"\n")


def _replace(file: Path, body: bytes) -> None:
    """Replace the file as a whole: a reader sees the old one or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)  # mode 0600
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(body)
            out.flush()
            os.fsync(out.fileno())
        Path(name).replace(file)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
        raise


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=32).digest()
