"""`tinkerbus up` in a process of its own, for as long as the demo runs.

Whatever happens, the service is stopped before the context ends; should this process be killed, it goes too.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from runtime.config import DEFAULT_TENANT
from runtime.demo.failure import DemoFailed

STOP_TIMEOUT_S = 60.0
_READY = re.compile(r"ready http=(\S+) nats=(\S+) metrics=(\S+)")
_COMMAND = (sys.executable, "-m", "runtime.cli.main")
_PR_SET_PDEATHSIG = 1
_DIED = signal.SIGUSR1
"""A signal of our own: SIGINT is ignored where a shell runs this in the background."""
_libc = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where the service is, and how to get in."""

    http: str
    nats: str
    metrics: str
    base_model: str
    tenant: str
    api_key: str
    nats_password: str


class _Died(BaseException):
    """The service ended unasked."""


def _raise_died(*_: object) -> None:
    raise _Died


def _main_thread() -> int:
    ident = threading.main_thread().ident
    assert ident is not None
    return ident


class Server:
    """A service that is coming up; `ready` waits for it."""

    def __init__(self, model: str, data: Path, say: Callable[[str], None]) -> None:
        """`model` is "tiny" or a folder; `say` hears what the service says while it starts."""
        self._model = model
        self._data = data
        self._say = say
        self._stopping = False
        self._last_lines: deque[str] = deque(maxlen=20)
        # In a session of its own: Ctrl-C reaches this process alone, which then stops the service in order.
        self._process = subprocess.Popen(
            [*_COMMAND, "up", "--model", model, "--data", str(data), "--port", "0"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=_environment(),
            start_new_session=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - one system call, nothing that could take a lock
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def ready(self) -> Endpoints:
        """Block until it serves. Raises DemoFailed with the service's own last words when it does not come up."""
        assert self._process.stdout is not None
        found = _READY.fullmatch(self._process.stdout.readline().strip())
        if found is None:
            raise self.failure()
        keys = json.loads((self._data / "keys.json").read_text())[DEFAULT_TENANT]
        self._watcher.start()
        return Endpoints(
            http=found[1],
            nats=found[2],
            metrics=found[3],
            base_model="tiny" if self._model == "tiny" else Path(self._model).name,
            tenant=DEFAULT_TENANT,
            api_key=keys["api_key"],
            nats_password=keys["nats_password"],
        )

    @property
    def died(self) -> bool:
        """Whether it ended unasked."""
        return not self._stopping and self._process.poll() is not None

    def failure(self) -> DemoFailed:
        code = self._process.wait(STOP_TIMEOUT_S)
        self._listener.join(STOP_TIMEOUT_S)
        return DemoFailed("\n".join([f"`tinkerbus up` ended with exit code {code}:", *self._last_lines]))

    def stop(self) -> None:
        """End it and everything it started. A second Ctrl-C or SIGTERM does not disturb that."""
        self._stopping = True
        numbers = (signal.SIGINT, signal.SIGTERM, _DIED)
        before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
        try:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            if self._watcher.ident is not None:
                self._watcher.join()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            word = line.strip().removeprefix("tinkerbus: ")
            self._last_lines.append(word)
            if word.endswith("…"):
                self._say(word)

    def _watch(self) -> None:
        """Clients wait minutes for a service that is away: tell the main thread that it will not come back."""
        self._process.wait()
        if self.died:
            signal.pthread_kill(_main_thread(), _DIED)


@contextlib.contextmanager
def starting(model: str, data: Path, say: Callable[[str], None]) -> Iterator[Server]:
    """Start the service on free ports, and stop it at the end. Raises DemoFailed should it end in between."""
    before = signal.signal(_DIED, _raise_died)
    server = Server(model, data, say)
    try:
        yield server
    except _Died:
        raise server.failure() from None
    finally:
        server.stop()
        signal.signal(_DIED, before)


def _environment() -> dict[str, str]:
    """Ours, without settings that were meant for another service."""
    return {k: v for k, v in os.environ.items() if not k.startswith("TINKERBUS_") and k != "RAY_ADDRESS"}


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
