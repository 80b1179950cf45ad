"""The configuration of the embedded broker: who may do what.

Servers share one account, which holds JetStream. Each tenant has an account of its own that imports exactly three
things: its submit subjects, its live results, and direct gets of its stored results. A reply subject is resolved in
the sender's account, so a forged one cannot reach the log or another tenant.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bus import subjects

SERVER_USER = "tinkerbus"
SERVER_ACCOUNT = "TINKERBUS"
SUPERVISOR_USER = "tinkerbus-supervisor"
"""May ask the broker how it is, and nothing of what it carries."""


@dataclass(slots=True)
class BrokerConfig:
    data_dir: Path
    port: int
    """-1 takes any free port; the broker writes it into a ports file."""
    max_payload: int
    max_file_store: int
    """Bytes that all streams together may take on disk."""
    sync_interval: str
    server_password: str
    supervisor_password: str
    tenants: dict[str, str]


def tenant_subjects(tenant: str) -> tuple[str, str, str]:
    """(publish an operation, direct get of a stored result, live results), with wildcards."""
    name = subjects.escape(tenant)
    results = f"{subjects.PREFIX}.results.{name}.>"
    return (
        f"{subjects.PREFIX}.submit.{name}.*",
        f"$JS.API.DIRECT.GET.{subjects.RESULTS_STREAM}.{results}",
        results,
    )


def check_tenants(tenants: Mapping[str, str]) -> None:
    """Raises ValueError for a name or a password that the broker could not tell apart."""
    for tenant, password in tenants.items():
        if not tenant or tenant in (SERVER_USER, SUPERVISOR_USER):
            raise ValueError(f"tenant {tenant!r}: choose another name, this one is empty or the servers' own")
        if not password:
            raise ValueError(f"tenant {tenant!r} has an empty password")


def render(config: BrokerConfig) -> str:
    """The configuration file. JSON, which the broker reads as well as its own format."""
    accounts: dict[str, object] = {
        SERVER_ACCOUNT: {
            "jetstream": "enabled",
            "users": [{"user": SERVER_USER, "password": config.server_password}],
            "exports": [export for tenant in config.tenants for export in _exports(tenant)],
        },
        "SYS": {"users": [{"user": SUPERVISOR_USER, "password": config.supervisor_password}]},
    }
    for tenant, password in config.tenants.items():
        accounts[_account(tenant)] = _tenant_account(tenant, password)
    whole = {
        "listen": f"127.0.0.1:{config.port}",
        "server_name": "tinkerbus-embedded",
        "ports_file_dir": str(config.data_dir),
        "pid_file": str(config.data_dir / "nats.pid"),
        "log_file": str(config.data_dir / "nats.log"),
        "logfile_size_limit": 16 * 2**20,
        "logfile_max_num": 3,
        "max_payload": config.max_payload,
        "max_pending": 256 * 2**20,
        "write_deadline": "30s",
        "jetstream": {
            "store_dir": str(config.data_dir / "streams"),
            "sync_interval": config.sync_interval,
            "max_file_store": config.max_file_store,
        },
        "system_account": "SYS",
        "accounts": accounts,
    }
    return json.dumps(whole, indent=1)


def _account(tenant: str) -> str:
    return f"T_{subjects.escape(tenant)}"


def _exports(tenant: str) -> list[dict[str, object]]:
    submit, get, live = tenant_subjects(tenant)
    only = [_account(tenant)]
    return [
        {"service": submit, "accounts": only},
        {"service": get, "accounts": only},
        {"stream": live, "accounts": only},
    ]


def _tenant_account(tenant: str, password: str) -> dict[str, object]:
    submit, get, live = tenant_subjects(tenant)
    user = {
        "user": tenant,
        "password": password,
        "permissions": {"publish": {"allow": [submit, get]}, "subscribe": {"allow": [live, "_INBOX.>"]}},
    }
    return {
        "users": [user],
        "imports": [
            {"service": {"account": SERVER_ACCOUNT, "subject": submit}},
            {"service": {"account": SERVER_ACCOUNT, "subject": get}},
            {"stream": {"account": SERVER_ACCOUNT, "subject": live}},
        ],
    }
