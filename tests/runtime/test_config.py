"""Settings: where they come from, and what is refused."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from runtime.config import Settings, load
from runtime.settings_reader import SettingsError


def refused(environment: dict[str, str] | None = None, file: Path | None = None, **overrides: object) -> str:
    with pytest.raises(SettingsError) as caught:
        load(file, environment or {}, {name.replace("__", "."): value for name, value in overrides.items()})
    message = str(caught.value)
    assert "\n" not in message
    return message


def toml(folder: Path, text: str) -> Path:
    file = folder / "tinkerbus.toml"
    file.write_text(text)
    return file


def test_without_any_source_everything_has_a_default() -> None:
    settings = load(environment={})
    assert settings == Settings()
    assert (settings.http.host, settings.http.port) == ("127.0.0.1", 8000)
    assert settings.served_name == "tiny"
    assert settings.tenant_names == ("default",)


def test_command_line_beats_environment_beats_file(tmp_path: Path) -> None:
    file = toml(tmp_path, '[http]\nport = 1\nhost = "::1"\n[layout]\ndp = 2\n[lora]\nalpha = 16\n')
    settings = load(file, {"TINKERBUS_HTTP__PORT": "2", "TINKERBUS_LAYOUT__DP": "3"}, {"http.port": 4})
    assert settings.http.port == 4
    assert settings.layout.dp == 3
    assert settings.http.host == "::1"
    assert settings.lora.alpha == 16.0


def test_environment_text_becomes_the_type_of_its_field() -> None:
    settings = load(
        environment={
            "TINKERBUS_GAP_TIMEOUT_S": "1.5",
            "TINKERBUS_LAYOUT__DISTRIBUTED_OPTIMIZER": "true",
            "TINKERBUS_NATS__PASSWORD": "123",
            "TINKERBUS_TENANTS": '{"a": {"api_keys": ["tml-1"]}}',
            "TINKERBUS_TENANTS__b__API_KEYS": '["tml-2"]',
            "HOME": "/elsewhere",
        }
    )
    assert settings.gap_timeout_s == 1.5
    assert settings.layout.distributed_optimizer is True
    assert settings.nats.password == "123"
    assert settings.tenants["a"].api_keys == ("tml-1",)
    assert settings.tenants["b"].api_keys == ("tml-2",)


def test_unknown_key_in_the_file_is_named_with_the_known_ones(tmp_path: Path) -> None:
    message = refused(file=toml(tmp_path, "[http]\nprot = 1\n"))
    assert "http.prot" in message
    assert "did you mean port?" in message
    assert "host, port, replicas" in message


def test_unknown_section_is_named_with_the_known_ones(tmp_path: Path) -> None:
    message = refused(file=toml(tmp_path, "[htpp]\nport = 1\n"))
    assert "htpp is not a setting" in message
    assert "http, client, nats" in message


def test_unknown_environment_variable_is_named_with_the_known_ones() -> None:
    message = refused({"TINKERBUS_LAYOUT__DQ": "1"})
    assert "TINKERBUS_LAYOUT__DQ" in message
    assert "TINKERBUS_LAYOUT__DP, TINKERBUS_LAYOUT__TP" in message


@pytest.mark.parametrize(
    ("variable", "text", "limit"),
    [
        ("TINKERBUS_HTTP__PORT", "65536", "<= 65535"),
        ("TINKERBUS_LAYOUT__DP", "0", ">= 1"),
        ("TINKERBUS_HTTP__LONG_POLL_S", "45", "<= 40"),
        ("TINKERBUS_LORA__ALPHA", "nan", "> 0"),
        ("TINKERBUS_HTTP__PORT", "http", "`int`"),
    ],
)
def test_bad_value_names_variable_value_and_limit(variable: str, text: str, limit: str) -> None:
    message = refused({variable: text})
    assert message.startswith(f"{variable} is '{text}'")
    assert limit in message


def test_bad_value_in_the_file_names_file_field_and_value(tmp_path: Path) -> None:
    file = toml(tmp_path, "[packing]\nmax_tokens_per_microbatch = 0\n")
    message = refused(file=file)
    assert message.startswith(f"{file}: packing.max_tokens_per_microbatch is 0: ")


def test_a_value_where_a_table_belongs_is_refused(tmp_path: Path) -> None:
    assert "http is 5, but is a table" in refused(file=toml(tmp_path, "http = 5\n"))
    assert "HTTP__PORT__X is not a setting" in refused({"TINKERBUS_HTTP__PORT__X": "1"})


def test_missing_or_broken_file_says_which(tmp_path: Path) -> None:
    assert "cannot be read" in refused(file=tmp_path / "none.toml")
    assert "is not TOML" in refused(file=toml(tmp_path, "= 1"))


def test_a_key_of_two_tenants_is_refused() -> None:
    message = refused({"TINKERBUS_TENANTS": '{"a": {"api_keys": ["tml-1"]}, "b": {"api_keys": ["tml-1"]}}'})
    assert "tenants.b.api_keys[0] is a key of tenants.a too" in message
    assert "tml-1" not in message


def test_a_key_the_sdk_would_not_send_is_refused_unshown() -> None:
    message = refused({"TINKERBUS_TENANTS": '{"a": {"api_keys": ["sk-secret"]}}'})
    assert "tenants.a.api_keys[0]" in message
    assert "sk-secret" not in message


def test_a_tenant_with_the_servers_name_is_refused() -> None:
    assert "tenants.tinkerbus" in refused({"TINKERBUS_TENANTS": '{"tinkerbus": {}}'})


def test_settings_travel_to_other_processes() -> None:
    settings = load(environment={"TINKERBUS_TENANTS": '{"a": {"api_keys": ["tml-1"]}}'})
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_secrets_are_not_printed() -> None:
    settings = load(
        environment={
            "TINKERBUS_NATS__PASSWORD": "hunter2",
            "TINKERBUS_TENANTS": '{"a": {"api_keys": ["tml-hunter2"], "nats_password": "hunter2"}}',
        }
    )
    assert "hunter2" not in repr(settings)


def test_threads_share_the_cores_out_unless_given() -> None:
    assert load(environment={}, overrides={"layout.dp": 3}).layout.threads(cores=8) == 2
    assert load(environment={}, overrides={"layout.dp": 4}).layout.threads(cores=2) == 1
    assert load(environment={}, overrides={"layout.threads_per_rank": 5}).layout.threads(cores=2) == 5


def test_the_served_name_is_the_folders_unless_given(tmp_path: Path) -> None:
    folder = str(tmp_path / "Qwen3-tiny")
    assert load(environment={}, overrides={"model": folder}).served_name == "Qwen3-tiny"
    assert load(environment={}, overrides={"model": folder, "model_name": "org/x"}).served_name == "org/x"
