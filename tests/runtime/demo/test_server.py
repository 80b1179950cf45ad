"""The service's process: started, watched and always stopped. A script stands in for `tinkerbus up`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from runtime.demo import server
from runtime.demo.failure import DemoFailed

SERVES = """
import json, pathlib, signal, sys, time
data = pathlib.Path(sys.argv[sys.argv.index("--data") + 1])
keys = {"default": {"api_key": "tml-x", "nats_password": "y"}}
(data / "keys.json").write_text(json.dumps(keys))
print("tinkerbus: starting Ray …", file=sys.stderr, flush=True)
print("ready http=http://h:1 nats=nats://h:2 metrics=http://h:1/metrics", flush=True)
"""
FOR_EVER = SERVES + "time.sleep(600)"


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(server, "_COMMAND", (sys.executable, "-c", request.param))


@pytest.fixture(params=["foreground", "background"])
def interrupts(request: pytest.FixtureRequest) -> Iterator[None]:
    """SIGINT as a shell leaves it for a command: in the background, where it has no job control, ignored."""
    handler = signal.SIG_IGN if request.param == "background" else signal.default_int_handler
    before = signal.signal(signal.SIGINT, handler)
    yield
    signal.signal(signal.SIGINT, before)


def running(folder: Path) -> list[psutil.Process]:
    """Processes that were started on the folder."""
    return [p for p in psutil.Process().children(recursive=True) if str(folder) in p.cmdline()]


@pytest.mark.parametrize("stand_in", [FOR_EVER], indirect=True)
@pytest.mark.usefixtures("stand_in")
def test_it_says_where_it_serves_and_is_gone_afterwards(tmp_path: Path) -> None:
    said: list[str] = []
    with server.starting("/models/Some-Model", tmp_path, said.append) as started:
        endpoints = started.ready()
        assert len(running(tmp_path)) == 1
    assert endpoints == server.Endpoints(
        http="http://h:1",
        nats="nats://h:2",
        metrics="http://h:1/metrics",
        base_model="Some-Model",
        tenant="default",
        api_key="tml-x",
        nats_password="y",
    )
    assert said == ["starting Ray …"]
    assert running(tmp_path) == []


@pytest.mark.parametrize("stand_in", [FOR_EVER], indirect=True)
@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_it_is_stopped_on_ctrl_c_and_on_any_error(tmp_path: Path, error: type[BaseException]) -> None:
    def fail() -> None:
        with server.starting("tiny", tmp_path, print) as started:
            started.ready()
            raise error

    with pytest.raises(error):
        fail()
    assert running(tmp_path) == []


@pytest.mark.parametrize(
    "stand_in", ["import sys; print('tinkerbus: no room', file=sys.stderr); sys.exit(3)"], indirect=True
)
@pytest.mark.usefixtures("stand_in")
def test_a_service_that_does_not_come_up_is_quoted(tmp_path: Path) -> None:
    with (
        pytest.raises(DemoFailed, match="exit code 3:\nno room"),
        server.starting("tiny", tmp_path, print) as started,
    ):
        started.ready()


@pytest.mark.parametrize("stand_in", [SERVES + "time.sleep(1); sys.exit('lost the disk')"], indirect=True)
@pytest.mark.usefixtures("stand_in")
@pytest.mark.usefixtures("interrupts")
def test_a_service_that_dies_later_ends_the_wait_for_it(tmp_path: Path) -> None:
    def wait() -> None:
        with server.starting("tiny", tmp_path, print) as started:
            started.ready()
            threading.Event().wait(60)

    began = time.monotonic()
    with pytest.raises(DemoFailed, match=r"exit code 1:\n(.*\n)*lost the disk"):
        wait()
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("stand_in", [FOR_EVER], indirect=True)
@pytest.mark.usefixtures("stand_in")
def test_settings_meant_for_another_service_do_not_reach_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKERBUS_LAYOUT__DP", "7")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with server.starting("tiny", tmp_path, print) as started:
        started.ready()
        (process,) = running(tmp_path)
        environment = process.environ()
    assert not {"TINKERBUS_LAYOUT__DP", "RAY_ADDRESS"} & set(environment)


def test_it_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent = (
        "import sys, time, pathlib\n"
        "from runtime.demo import server\n"
        f"server._COMMAND = (sys.executable, '-c', {FOR_EVER!r})\n"
        f"with server.starting('tiny', pathlib.Path({str(tmp_path)!r}), lambda _: None) as started:\n"
        "    started.ready()\n"
        "    print(started._process.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    process = psutil.Popen([sys.executable, "-c", parent], stdout=-1, stderr=-3, text=True)
    lines = iter(process.stdout.readline, "")
    child = psutil.Process(int(next(line for line in lines if line.strip().isdigit())))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    child_gone, _ = psutil.wait_procs([child], timeout=10)
    assert child_gone == [child]
    assert json.loads((tmp_path / "keys.json").read_text())
