"""`tinkerbus gates` in front of what is no Tinker-compatible server: one line, at once."""

from __future__ import annotations

import http.server
import sys
import threading
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from runtime.cli.main import app
from tests.support.service import free_port

KEY = "tml-right"


class _Answers(http.server.BaseHTTPRequestHandler):
    """404 to everything; 401 to a wrong key below /locked."""

    def do_POST(self) -> None:
        locked = self.path.startswith("/locked") and self.headers["x-api-key"] != KEY
        self.send_response(401 if locked else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def stderr(*arguments: str) -> str:
    found = CliRunner().invoke(app, ["gates", *arguments])
    assert found.exit_code == 2, found.output
    assert found.stderr.count("\n") == 1
    return found.stderr


def test_no_server() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert f"{url} does not answer" in stderr("--url", url, "--api-key", KEY)


def test_another_kind_of_server(url: str) -> None:
    assert "it is not a Tinker-compatible server" in stderr("--url", url, "--api-key", KEY)


def test_a_wrong_key(url: str) -> None:
    assert "refuses the API key (401)" in stderr("--url", f"{url}/locked", "--api-key", "tml-wrong")


def test_an_unknown_gate(url: str) -> None:
    assert "there is no gate 'twin'" in stderr("--url", url, "--only", "twin")


def test_without_the_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[:2] == ["runtime", "gates"]]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tinker", None)
    found = CliRunner().invoke(app, ["gates", "--url", "http://127.0.0.1:1"])
    assert (found.exit_code, found.stderr) == (
        1,
        "tinkerbus: the gates need tinker: pip install 'tinkerbus[demo]'\n",
    )
