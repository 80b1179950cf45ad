"""The whole service as a user starts it: the command `tinkerbus up` in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bus import lease
from bus.broker_config import SERVER_USER
from bus.connection import Credentials, connect
from bus.lease import LeaseRow

START_TIMEOUT_S = 400
STOP_TIMEOUT_S = 60


@dataclass
class Service:
    """A running `tinkerbus up`. Started by `started`, or by hand with `start`."""

    data: Path
    options: tuple[str, ...] = ()
    port: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    """What its processes have beside our own environment."""
    process: subprocess.Popen[str] | None = None
    http: str = ""
    nats: str = ""
    metrics: str = ""
    stderr: list[str] = field(default_factory=list)

    def start(self) -> Service:
        command = [str(Path(sys.executable).with_name("tinkerbus")), "up", "--data", str(self.data)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("TINKERBUS_", "RAY_"))}
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port), *self.options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment, **self.environment},
        )
        threading.Thread(target=self._collect, args=(self.process,), daemon=True).start()
        line = self._ready_line(self.process)
        found = re.fullmatch(r"ready http=(\S+) nats=(\S+) metrics=(\S+)", line.strip())
        assert found is not None, (line, "".join(self.stderr))
        self.http, self.nats, self.metrics = found.groups()
        self.port = int(self.http.rsplit(":", 1)[1])
        return self

    def _collect(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        self.stderr.extend(process.stderr)

    def _ready_line(self, process: subprocess.Popen[str]) -> str:
        lines: list[str] = []

        def read() -> None:
            assert process.stdout is not None
            lines.append(process.stdout.readline())

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        reader.join(START_TIMEOUT_S)
        assert lines, f"no ready line after {START_TIMEOUT_S} s: {''.join(self.stderr)}"
        return lines[0]

    @property
    def api_key(self) -> str:
        key: str = json.loads((self.data / "keys.json").read_text())["default"]["api_key"]
        return key

    @property
    def nats_password(self) -> str:
        password: str = json.loads((self.data / "keys.json").read_text())["default"]["nats_password"]
        return password

    def metric(self, name: str) -> float:
        """The sum of a metric's series as they are exported now; 0 where there is none."""
        with urllib.request.urlopen(self.metrics, timeout=10) as answer:
            page = answer.read().decode()
        return sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE)))

    def tree(self) -> list[psutil.Process]:
        """The process of `up` and all its descendants."""
        assert self.process is not None
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def leaseholder(self) -> LeaseRow:
        """The dispatcher that acts, as its lease says. For embedded brokers."""
        credentials = Credentials(SERVER_USER, (self.data / "nats" / "server.password").read_text().strip())

        async def read() -> LeaseRow:
            async with await connect(self.nats, credentials, name="test") as bus:
                found = await (await lease.open_leases(bus)).get("main")
            assert found is not None
            return found[0]

        with ThreadPoolExecutor(1) as thread:  # the caller may have a loop of its own
            return thread.submit(asyncio.run, read()).result()

    def acting_dispatcher(self, within_s: float = 60.0) -> psutil.Process:
        """Its process, as soon as there is one that acts."""
        deadline = time.monotonic() + within_s
        while not (holder := self.leaseholder().holder):
            assert time.monotonic() < deadline, f"no dispatcher acts after {within_s:g} s"
            time.sleep(0.1)
        return psutil.Process(int(holder.split()[0]))

    def kill_tree(self) -> list[psutil.Process]:
        """`kill -9` on every process of the tree at once; returns what was killed."""
        tree = self.tree()
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        assert self.process is not None
        self.process.wait(STOP_TIMEOUT_S)
        return tree

    def stop(self) -> int:
        """SIGTERM, as an init system sends it; the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill_tree()
            raise


@contextlib.contextmanager
def started(
    data: Path, *options: str, port: int = 0, environment: dict[str, str] | None = None
) -> Iterator[Service]:
    service = Service(data, options, port, environment or {})
    try:
        yield service.start()
    finally:
        if service.process is not None:
            service.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def left_over(processes: list[psutil.Process], within_s: float = 15) -> list[psutil.Process]:
    """Those that are still there after `within_s` seconds, zombies left out."""
    deadline = time.monotonic() + within_s
    while True:
        alive = [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.2)
