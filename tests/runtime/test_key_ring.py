"""API keys that are given out by command: hashed, and known to servers that run already."""

from __future__ import annotations

import pickle
import re
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bus.connection import BrokerUnreachable, Credentials, WrongCredentials, connect
from bus.embedded import EmbeddedBroker
from runtime import broker_tenants, key_ring, keys
from runtime.cli.main import app
from runtime.config import Settings, Tenant
from runtime.key_ring import KeyRing
from tests.bus.waiting import until
from tests.runtime.ingress.conftest import Wire, client
from tests.runtime.stand_in import Service


def command(*arguments: str, code: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(app, ["keys", *arguments])
    assert result.exit_code == code, result.stderr
    return result.stdout.strip(), result.stderr.strip()


def test_a_key_is_printed_once_and_kept_as_a_salted_hash(tmp_path: Path) -> None:
    key, said = command("add", "--data", str(tmp_path), "--note", "of the lab")
    assert key.startswith("tml-")
    assert "default" in said
    assert keys.load(Settings(data=str(tmp_path))).tenant_of(key) == "default"
    file = tmp_path / "api_keys.json"
    assert key not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    row = command("list", "--data", str(tmp_path))[0]
    assert re.fullmatch(r"k-\w{8}  default  since [\d :-]+  for ever  of the lab", row)
    other = tmp_path / "other"
    command("add", "--data", str(other))
    salts = {
        re.search(r'"salt": "(\w{32})"', (at / "api_keys.json").read_text())[1] for at in (tmp_path, other)
    }  # type: ignore[index]
    assert len(salts) == 2


def test_a_revoked_key_belongs_to_nobody_and_the_others_stay(tmp_path: Path) -> None:
    data = ("--data", str(tmp_path))
    first, said = command("add", *data)
    second, _ = command("add", *data)
    third, _ = command("add", *data, "--tenant", "lab")
    command("revoke", said.split()[1], *data)
    found = keys.load(Settings(data=str(tmp_path)))
    assert [found.tenant_of(key) for key in (first, second, third)] == [None, "default", "lab"]
    command("revoke", "--tenant", "lab", *data)
    assert keys.load(Settings(data=str(tmp_path))).tenant_of(third) is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("revoke", "k-none"), "there is no key 'k-none'"),
        (("revoke", "--tenant", "nobody"), "there is no key of tenant 'nobody'"),
        (("revoke",), "one of the two"),
        (("add", "--tenant", "tinkerbus"), "tenant 'tinkerbus': choose another name"),
        (("add", "--days", "0"), "--days is 0"),
        (("add", "--config", "none.toml"), "none.toml cannot be read"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    _, said = command(*arguments, "--data", str(tmp_path), code=1)
    assert says in said
    assert len(said.splitlines()) == 1
    assert said.startswith("tinkerbus: ")


def test_a_key_for_a_while_belongs_to_nobody_after_it(tmp_path: Path) -> None:
    file = tmp_path / "api_keys.json"
    key_ring.add(file, "a", "tml-1", expires_at=time.time() + 60)
    key_ring.add(file, "b", "tml-2", expires_at=time.time() - 1)
    ring = KeyRing(file)
    assert (ring.tenant_of("tml-1"), ring.tenant_of("tml-2")) == ("a", None)
    assert ring.tenants() == ["a"]


@pytest.mark.parametrize(("body", "mode", "says"), [("{", 0o600, "is damaged"), ("{}", 0o644, "mode 0644")])
def test_a_file_that_cannot_be_used_is_refused_at_the_start_and_changes_nothing_later(
    tmp_path: Path, body: str, mode: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_ring, "LOOK_EVERY_S", 0.0)
    file = tmp_path / "api_keys.json"
    key_ring.add(file, "a", "tml-1")
    ring = KeyRing(file)
    file.write_text(body)
    file.chmod(mode)
    assert ring.tenant_of("tml-1") == "a"
    with pytest.raises(keys.KeyFileError, match=says):
        KeyRing(file)


def test_a_ring_travels_to_other_processes_and_prints_nothing(tmp_path: Path) -> None:
    file = tmp_path / "api_keys.json"
    row = key_ring.add(file, "a", "tml-1")
    ring = KeyRing(file)
    assert pickle.loads(pickle.dumps(ring)).tenant_of("tml-1") == "a"
    assert row.hash not in repr(ring)


def test_a_tenant_with_a_key_has_a_broker_password_that_stays(tmp_path: Path) -> None:
    settings = Settings(data=str(tmp_path), tenants={"a": Tenant(nats_password="p")})
    command("add", "--data", str(tmp_path), "--tenant", "lab")
    first, again = keys.load(settings), keys.load(settings)
    assert first.nats_passwords().keys() == {"a", "lab"}
    assert first.nats_password("lab") == again.nats_password("lab") != ""
    assert first.secret == again.secret


async def test_an_ingress_that_runs_follows_within_two_seconds(service: Service) -> None:
    file = Path(service.settings.data) / "api_keys.json"
    ring = KeyRing(file)
    replica = await service.replica(keys=keys.Keys(dict(service.settings.tenants), ring=ring))
    async with client(replica.url, "tml-new") as http:
        wire = Wire(http)

        async def status() -> int:
            return (await wire.post("client/config", {})).status_code

        async def known() -> bool:
            return await status() == 200

        async def unknown() -> bool:
            return await status() == 401

        assert await unknown()
        row = key_ring.add(file, "carol", "tml-new")
        began = time.monotonic()
        await until(known)
        key_ring.revoke(file, key_id=row.id)
        await until(unknown)
        assert time.monotonic() - began < 4


async def test_the_embedded_broker_follows_too(tmp_path: Path) -> None:
    settings = Settings(data=str(tmp_path))
    file = keys.ring_file(settings)
    with (
        EmbeddedBroker(tmp_path / "nats", keys.load(settings).nats_passwords(), sync_interval="2m") as broker,
        broker_tenants.followed(settings, broker, lambda _: None, 0.05),
    ):

        async def lets_in(password: str) -> bool | None:
            """None while the broker restarts."""
            try:
                bus = await connect(
                    broker.url, Credentials("lab", password), name="test", uses_jetstream=False
                )
            except WrongCredentials:
                return False
            except BrokerUnreachable:
                return None
            await bus.close()
            return True

        assert await lets_in("x") is False
        key_ring.add(file, "lab", "tml-1")
        password = keys.load(settings).nats_password("lab")
        await until(lambda: lets_in(password))
        key_ring.revoke(file, tenant="lab")

        async def shut_out() -> bool:
            return await lets_in(password) is False

        await until(shut_out)
