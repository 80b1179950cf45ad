"""The command line: quick to answer, and clear about what it refuses."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loss_hub import registry
from loss_hub.plugins import Plugins
from runtime.cli.main import app
from tests.support import plugins

HEAVY = ("torch", "ray", "megatron", "transformers", "fastapi", "nats", "numpy", "pydantic", "uvicorn")


def test_help_imports_nothing_heavy() -> None:
    """What makes `tinkerbus --help` take less than half a second."""
    code = f"import sys, runtime.cli.main; print([name for name in {HEAVY!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_help_names_the_commands() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "up" in result.output


def test_a_taken_port_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(app, ["up", "--port", port, "--data", str(tmp_path / "data")])
    assert result.exit_code == 1
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith(
        f"tinkerbus: http.port {port} on 127.0.0.1 cannot be listened on (Address already in use)"
    )


def test_a_broken_loss_plug_in_is_named_in_a_line_and_the_start_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(plugins.install(tmp_path / "installed", "odd-loss", {"ppo": "odd_up:ppo"}))
    monkeypatch.setattr(registry, "_LOSSES", dict(registry._LOSSES))
    monkeypatch.setattr(registry, "_PLUGINS", Plugins())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(app, ["up", "--port", port, "--data", str(tmp_path / "data")])
    left_out, port_is_taken = result.stderr.strip().splitlines()
    assert left_out == (
        "tinkerbus: loss plug-in 'ppo' (odd_up:ppo of odd-loss) is left out: "
        "ModuleNotFoundError: No module named 'odd_up'"
    )
    assert "cannot be listened on" in port_is_taken


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tp", "3"], "layout.tp is 3, which does not divide the model's 4 attention heads"),
        (
            ["--pp", "8"],
            "layout.pp · layout.virtual_pp is 8 · 1 = 8, which does not divide the model's 4 layers",
        ),
        (["--ep", "2"], "layout.ep is 2"),
        (["--model", "nowhere"], "is not a Hugging Face model folder: it has no config.json"),
        (["--dp", "0"], "command line: layout.dp is 0: expected `int` >= 1"),
        (["--port", "70000"], "command line: http.port is 70000: expected `int` <= 65535"),
        (["--config", "none.toml"], "config file none.toml cannot be read"),
    ],
)
def test_a_bad_setting_ends_up_with_one_line(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["up", *arguments])
    assert result.exit_code == 2
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1
    assert says in lines[0]
    assert lines[0].startswith("tinkerbus: ")
    assert list(tmp_path.iterdir()) == []
