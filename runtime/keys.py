"""Who a request comes from: API keys of the SDK, passwords of the tenants' broker users.

Keys come from the settings; what they leave out is made once and kept in the data folder, readable by its
owner alone, so that a restart accepts the same keys. More are given out while the service runs: see
`runtime.key_ring`. Picklable: every ingress replica gets a copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from pathlib import Path

import msgspec

from runtime import key_ring, private_file
from runtime.config import DEFAULT_TENANT, KEY_PREFIX, Settings, Tenant
from runtime.key_ring import KeyRing
from runtime.private_file import KeyFileError

__all__ = ["KeyFileError", "Keys", "load", "new_key", "ring_file"]

FILE_NAME = "keys.json"
SECRET_NAME = "download.key"


class _Made(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What was made for one tenant."""

    api_key: str | None = None
    nats_password: str | None = None


class Keys:
    """The keys of all tenants. Never printed."""

    def __init__(
        self, tenants: dict[str, Tenant], secret: bytes | None = None, ring: KeyRing | None = None
    ) -> None:
        self._tenants = {_digest(key): name for name, row in tenants.items() for key in row.api_keys}
        self._first = {name: row.api_keys[0] for name, row in tenants.items() if row.api_keys}
        self._passwords = {name: row.nats_password or "" for name, row in tenants.items()}
        self._ring = ring
        self.secret = secret or secrets.token_bytes(32)
        """What download URLs are signed with; the same at every ingress."""

    def tenant_of(self, api_key: str) -> str | None:
        """The tenant a key belongs to, or None. Digests are compared: the time taken tells nothing."""
        tenant = self._tenants.get(_digest(api_key))
        if tenant is None and self._ring is not None:
            tenant = self._ring.tenant_of(api_key)
        return tenant

    def api_key(self, tenant: str) -> str:
        """A key the tenant can use: its first in the settings, or the one that was made for it."""
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

    Raises KeyFileError where a kept file cannot be used.
    """
    file = Path(settings.data) / FILE_NAME
    made = _read(file)
    before = msgspec.json.encode(made)
    ring = KeyRing(ring_file(settings))
    tenants: dict[str, Tenant] = {}
    for name, row in (settings.tenants or {DEFAULT_TENANT: Tenant()}).items():
        kept = made.setdefault(name, _Made())
        if not row.api_keys and kept.api_key is None:
            kept.api_key = new_key()
        tenants[name] = Tenant(
            api_keys=row.api_keys or ((kept.api_key,) if kept.api_key else ()),
            nats_password=row.nats_password or _password(kept),
        )
    for name in ring.tenants():
        if name not in tenants:
            tenants[name] = Tenant(nats_password=_password(made.setdefault(name, _Made())))
    if msgspec.json.encode(made) != before:
        private_file.replace(file, msgspec.json.format(msgspec.json.encode(made), indent=2) + b"\n")
    return Keys(tenants, _secret(file.with_name(SECRET_NAME)), ring)


def new_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(24)


def ring_file(settings: Settings) -> Path:
    """Where the keys are that were given out by command."""
    return Path(settings.data).resolve() / key_ring.FILE_NAME


def _password(kept: _Made) -> str:
    if kept.nats_password is None:
        kept.nats_password = secrets.token_urlsafe(24)
    return kept.nats_password


def _secret(file: Path) -> bytes:
    """Made once: a URL that was signed before a restart is good after it."""
    with contextlib.suppress(FileNotFoundError):
        body = private_file.read(file)
        try:
            return bytes.fromhex(body.decode().strip())
        except ValueError as error:
            raise KeyFileError(
                f"key file {file} is damaged: {error}; remove it to have a new one made"
            ) from error
    secret = secrets.token_bytes(32)
    private_file.replace(file, secret.hex().encode() + b"\n")
    return secret


def _read(file: Path) -> dict[str, _Made]:
    try:
        body = private_file.read(file)
    except FileNotFoundError:
        return {}
    try:
        return msgspec.json.decode(body, type=dict[str, _Made])
    except msgspec.MsgspecError as error:
        raise KeyFileError(f"key file {file} is damaged: {error}; remove it to have new keys made") from error


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=32).digest()
