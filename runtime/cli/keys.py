"""`tinkerbus keys`: give out API keys and take them back, whether the service runs or not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from runtime.config import Settings

keys = typer.Typer(
    name="keys",
    help="Give out API keys and take them back; a service that runs follows within two seconds.",
    no_args_is_help=True,
)

Data = Annotated[
    str | None, typer.Option("--data", help="Data folder of the service, as `up` takes it.", metavar="DIR")
]
Config = Annotated[Path | None, typer.Option("--config", help="Settings as TOML.", metavar="FILE")]


@keys.command()
def add(
    tenant: Annotated[str | None, typer.Option(help="Whose key; a new name is a new tenant.")] = None,
    days: Annotated[
        float | None, typer.Option(help="How long it is good; for ever by default.", metavar="DAYS")
    ] = None,
    note: Annotated[str, typer.Option(help="What it is for, in your words.")] = "",
    data: Data = None,
    config: Config = None,
) -> None:
    """Make a key and print it, once: only its hash is kept."""
    import time

    with _errors_in_a_line():
        from bus.broker_config import check_tenants
        from runtime import key_ring
        from runtime import keys as kept

        settings = _settings(data, config)
        whose = settings.tenant_names[0] if tenant is None else tenant
        check_tenants({whose: "-"})
        if days is not None and not 0 < days < 36500:
            raise ValueError(f"--days is {days:g}: expected a number above 0 and below 36500")
        key = kept.new_key()
        row = key_ring.add(
            kept.ring_file(settings),
            whose,
            key,
            expires_at=None if days is None else time.time() + days * 86400,
            note=note,
        )
        kept.load(settings)  # a new tenant gets its broker password now
    typer.echo(f"key {row.id} of tenant {whose!r}:", err=True)
    typer.echo(key)


@keys.command("list")
def list_keys(
    tenant: Annotated[str | None, typer.Option(help="Only this one's.")] = None,
    data: Data = None,
    config: Config = None,
) -> None:
    """Show the keys that were given out by command, without the keys themselves."""
    with _errors_in_a_line():
        from runtime import keys as kept
        from runtime.key_ring import KeyRing

        rows = KeyRing(kept.ring_file(_settings(data, config))).rows()
    for row in rows:
        if tenant in (None, row.tenant):
            until = f"until {_day(row.expires_at)}" if row.expires_at is not None else "for ever"
            line = f"{row.id}  {row.tenant}  since {_day(row.created_at)}  {until}  {row.note}"
            typer.echo("".join(c if c.isprintable() else "?" for c in line.rstrip()))


@keys.command()
def revoke(
    key_id: Annotated[str | None, typer.Argument(metavar="ID", help="As `list` shows it.")] = None,
    tenant: Annotated[str | None, typer.Option(help="All keys of this tenant instead.")] = None,
    data: Data = None,
    config: Config = None,
) -> None:
    """Take back one key, or all that a tenant was given by command. Keys of the settings stay there."""
    with _errors_in_a_line():
        from runtime import key_ring
        from runtime import keys as kept

        if (key_id is None) == (tenant is None):
            raise ValueError("name the ID of a key, or a --tenant: one of the two")
        gone = key_ring.revoke(kept.ring_file(_settings(data, config)), key_id=key_id, tenant=tenant)
        if not gone:
            what = f"{key_id!r}" if key_id is not None else f"of tenant {tenant!r}"
            raise ValueError(f"there is no key {what}: `tinkerbus keys list` shows those that can be revoked")
    for row in gone:
        typer.echo(f"revoked {row.id} of tenant {row.tenant!r}", err=True)


def _day(seconds: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def _settings(data: str | None, config: Path | None) -> Settings:
    from runtime.config import load

    return load(config, overrides={} if data is None else {"data": data})


@contextlib.contextmanager
def _errors_in_a_line() -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError) as error:  # SettingsError and KeyFileError are ValueErrors
        typer.echo(f"tinkerbus: {error}", err=True)
        raise typer.Exit(1) from None
