"""API keys and broker passwords: configured, or made once and kept."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from runtime import keys
from runtime.config import Settings, Tenant


def settings(folder: Path, **tenants: Tenant) -> Settings:
    return Settings(data=str(folder / "data"), tenants=tenants)


def test_a_made_key_is_kept_over_a_restart_and_readable_by_its_owner_alone(tmp_path: Path) -> None:
    first = keys.load(settings(tmp_path))
    again = keys.load(settings(tmp_path))
    key = first.api_key("default")
    assert key.startswith("tml-")
    assert again.api_key("default") == key
    assert again.tenant_of(key) == "default"
    assert again.nats_password("default") == first.nats_password("default") != ""
    assert (tmp_path / "data" / "keys.json").stat().st_mode & 0o777 == 0o600


def test_configured_keys_are_used_and_not_written_down(tmp_path: Path) -> None:
    found = keys.load(
        settings(
            tmp_path, a=Tenant(api_keys=("tml-1", "tml-2"), nats_password="p"), b=Tenant(api_keys=("tml-3",))
        )
    )
    assert [found.tenant_of(key) for key in ("tml-1", "tml-2", "tml-3")] == ["a", "a", "b"]
    assert found.nats_password("a") == "p"
    assert "tml-" not in (tmp_path / "data" / "keys.json").read_text()


@pytest.mark.parametrize("key", ["", "tml-", "tml-1 ", "TML-1", "tml-é", "tml-\udcff"])
def test_another_key_belongs_to_nobody(tmp_path: Path, key: str) -> None:
    assert keys.load(settings(tmp_path, a=Tenant(api_keys=("tml-1",)))).tenant_of(key) is None


def test_a_tenant_that_left_the_settings_loses_its_made_key(tmp_path: Path) -> None:
    left = keys.load(settings(tmp_path, a=Tenant())).api_key("a")
    assert keys.load(settings(tmp_path, b=Tenant())).tenant_of(left) is None


def test_a_key_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    keys.load(settings(tmp_path))
    file = tmp_path / "data" / "keys.json"
    file.chmod(0o644)
    with pytest.raises(keys.KeyFileError, match="mode 0644"):
        keys.load(settings(tmp_path))


def test_a_damaged_key_file_is_refused_by_name(tmp_path: Path) -> None:
    keys.load(settings(tmp_path))
    file = tmp_path / "data" / "keys.json"
    file.write_text("{")
    with pytest.raises(keys.KeyFileError, match=r"keys\.json is damaged"):
        keys.load(settings(tmp_path))


def test_keys_travel_to_other_processes_and_are_not_printed(tmp_path: Path) -> None:
    found = keys.load(settings(tmp_path, a=Tenant(api_keys=("tml-secret",), nats_password="hidden")))
    copy = pickle.loads(pickle.dumps(found))
    assert copy.tenant_of("tml-secret") == "a"
    assert "secret" not in repr(found)
    assert "hidden" not in repr(found)
