"""One run of the tenants against a service of its own, undisturbed or along a schedule."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.chaos import broker, processes
from tests.chaos.clients import Progress, Worker
from tests.chaos.plan import CHUNK, TENANTS
from tests.chaos.schedule import HEARTBEAT_S, KILL, LEASE_S, Event, Kind
from tests.support.service import Service, free_port, left_over

CONFIG = f"""\
[nats]
port = {{port}}

[debug]
dump_gradients = {{dumps}}

[layout]
dp = {{dp}}
distributed_optimizer = true

[client]
fwdbwd_max_chunk_len = {CHUNK}

[recovery]
replay_budget_s = 1.0
lease_s = {LEASE_S}
heartbeat_timeout_s = {HEARTBEAT_S}
"""

RECOVERED_WITHIN_S = 150.0
SETTLE_S = 0.3
"""What is done within it counts as done before the event."""

MISMATCH = "differs from the result that was published"
"""What the dispatcher logs with `tinkerbus_replay_mismatches_total`, which a killed exporter forgets."""

HEARD_BY: dict[Kind, frozenset[str]] = {
    kind: frozenset(tenant.name for tenant in TENANTS if tenant.over == over)
    for kind, over in ((Kind.INGRESS, "sdk"), (Kind.PROXY, "sdk"), (Kind.INTAKE, "nats"))
}
"""Whose results depend on the kind; everybody's, where it is not here."""


class NotRecovered(RuntimeError):
    """Nothing was served for long after an event, or a client gave up."""


@dataclass(frozen=True, slots=True)
class Hit:
    """An event, and what came of it."""

    event: Event
    at_s: float
    """After the training began."""
    recovered_s: float | None
    """From the event to the next result of an operation that had none at the event; None for never."""


@dataclass
class Outcome:
    """Everything one run told."""

    records: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)
    dumps: Path = Path()
    hits: list[Hit] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """What should not have happened, in words."""
    training_s: float = 0.0
    seconds: float = 0.0


class Run:
    """See the module. `folder` is emptied first, and keeps logs, data and dumps."""

    def __init__(
        self,
        folder: Path,
        steps: int,
        events: Sequence[Event] = (),
        *,
        dp: int = 2,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._folder = folder
        self._steps = steps
        self._events = events
        self._say = say
        self._progress = Progress()
        self._workers: list[Worker] = []
        self._outcome = Outcome(dumps=folder / "dumps")
        self._began = 0.0
        self._stopped: list[psutil.Process] = []
        config = folder / "tinkerbus.toml"
        values = {"port": free_port(), "dp": dp, "dumps": json.dumps(str(self._outcome.dumps))}
        config.write_text(CONFIG.format(**values))
        self._service = Service(folder / "data", ("--config", str(config)), port=free_port())

    def go(self) -> Outcome:
        """Start, train, hit, stop. What goes wrong is in the outcome's `faults`."""
        began = time.monotonic()
        try:
            self._say("starting")
            self._service.start()
            self._train()
            self._look_at_results()
        except (NotRecovered, processes.NotThere, AssertionError, RuntimeError) as error:
            self._fault(f"{type(error).__name__}: {error}")
        finally:
            self._progress.end()
            self._wake()
            self._stop()
        self._outcome.seconds = time.monotonic() - began
        return self._outcome

    def _train(self) -> None:
        self._say("making models")
        self._workers = [Worker(tenant, self._service, self._steps, self._progress) for tenant in TENANTS]
        for worker in self._workers:
            worker.wait_until_created(120)
        self._outcome.models = {worker.tenant.name: worker.model_id for worker in self._workers}
        self._began = time.monotonic()
        for worker in self._workers:
            worker.begin()
        for event in self._events:
            self._wait(lambda e=event: self._progress.total() >= e.after_steps, "the next event")  # type: ignore[misc]
            time.sleep(event.delay_s)
            self._hit(event)
        self._say("training to the end")
        self._wait(lambda: all(not worker.thread.is_alive() for worker in self._workers), "the end")
        self._check_workers()
        self._outcome.training_s = time.monotonic() - self._began
        self._outcome.records = {worker.tenant.name: worker.records for worker in self._workers}

    # ----------------------------------------------------------------------------------------------- events

    def _hit(self, event: Event) -> None:
        self._say(f"{event.kind}: {event.what}")
        victim = None
        if event.kind is not Kind.EVERYTHING:
            victim = processes.target(self._service, event.kind, event.which)
        if event.kind is Kind.EVERYTHING:
            self._keep_logs()
        done = None
        if event.kind in (Kind.BROKER, Kind.EVERYTHING):  # it cannot be asked any more afterwards
            done = self._done(event.kind)
        at = time.monotonic()
        waking = None
        if victim is None:
            self._kill_everything()
        elif event.signal == KILL:
            victim.send_signal(signal.SIGKILL)
        else:
            victim.send_signal(signal.SIGSTOP)
            self._stopped.append(victim)
            waking = threading.Timer(event.stop_s, self._wake)
            waking.start()
        restarting = None
        try:
            if victim is None:
                restarting = _Restart(self._service)
                restarting.start()
            time.sleep(SETTLE_S)
            if done is None:
                done = self._done(event.kind)
            done = self._received(done)
            recovered = self._recovered(event, at, done, restarting)
            self._outcome.hits.append(Hit(event, at - self._began, recovered))
            if recovered is None:
                raise NotRecovered(f"nothing was served for {RECOVERED_WITHIN_S:g} s after {event}")
        finally:
            if waking is not None:
                waking.join()
            if restarting is not None:
                restarting.join()
        self._check_workers()
        self._read_mismatches()

    def _kill_everything(self) -> None:
        left = left_over(self._service.kill_tree())
        if left:
            self._fault(f"still there after SIGKILL: {left}")

    def _done(self, kind: Kind) -> dict[str, int]:
        """What says nothing of a recovery: results that are there, and of the intake what it has let in."""
        if kind is Kind.INTAKE:
            return broker.newest_accepted(self._service, self._outcome.models)
        return broker.newest_results(self._service, self._outcome.models)

    def _received(self, done: dict[str, int]) -> dict[str, int]:
        """What was under way to a client when it was asked for counts as done."""
        with self._progress.changed:
            newest = {
                name: max((r.seq_id for r in got), default=0) for name, got in self._progress.received.items()
            }
        return {tenant: max(number, newest[tenant]) for tenant, number in done.items()}

    def _recovered(
        self, event: Event, at: float, done: dict[str, int], restarting: _Restart | None
    ) -> float | None:
        deadline = at + RECOVERED_WITHIN_S
        if event.kind is Kind.EXPORTER:
            return self._page_is_back(at, deadline)
        heard_by = HEARD_BY.get(event.kind, frozenset(self._outcome.models))

        def first() -> float | None:
            times = [
                received.at
                for tenant in heard_by
                for received in self._progress.received[tenant]
                if received.at > at and received.seq_id > done[tenant]
            ]
            return min(times, default=None)

        with self._progress.changed:
            while (found := first()) is None:
                if not self._progress.changed.wait(1.0) and time.monotonic() > deadline:
                    return None
                self._check_workers()
                if restarting is not None and restarting.error is not None:
                    raise NotRecovered(f"the service did not start again: {restarting.error}")
        return found - at

    def _page_is_back(self, at: float, deadline: float) -> float | None:
        """Nothing that clients wait for depends on the exporter; its page does."""
        while time.monotonic() < deadline:
            if self._page() is not None:
                return time.monotonic() - at
            time.sleep(0.1)
        return None

    def _wake(self) -> None:
        for process in self._stopped:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)
        self._stopped = []

    # ---------------------------------------------------------------------------------------------- checks

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 2 * RECOVERED_WITHIN_S
        with self._progress.changed:
            while not condition():
                self._progress.changed.wait(0.5)
                self._check_workers()
                if time.monotonic() > deadline:
                    raise NotRecovered(f"waited too long for {what}; steps: {self._progress.steps}")

    def _check_workers(self) -> None:
        for worker in self._workers:
            if worker.error is not None:
                raise NotRecovered(f"client {worker.tenant.name} raised {worker.error!r}") from worker.error

    def _look_at_results(self) -> None:
        """Every operation has one result: none is lost, none came twice."""
        for worker in self._workers:
            counts = broker.count_results(self._service, worker.model_id)
            wanted = set(range(worker.requests + 1))
            if lost := wanted - counts.keys():
                self._fault(f"{worker.tenant.name}: no result for seq_id {sorted(lost)}")
            if strange := counts.keys() - wanted:
                self._fault(f"{worker.tenant.name}: results that nobody asked for: {sorted(strange)}")
            if twice := [number for number, count in counts.items() if count != 1]:
                self._fault(f"{worker.tenant.name}: several results for seq_id {twice}")
        self._read_mismatches()

    def _read_mismatches(self) -> None:
        page = self._page() or ""
        found = re.findall(r"^tinkerbus_replay_mismatches_total{.*} (\S+)$", page, re.MULTILINE)
        if count := sum(map(float, found)):
            self._fault(f"tinkerbus_replay_mismatches_total is {count:g}")

    def _page(self) -> str | None:
        try:
            with urllib.request.urlopen(self._service.metrics, timeout=2) as answer:
                page: str = answer.read().decode()
        except OSError:
            return None
        return page

    def _fault(self, words: str) -> None:
        if words not in self._outcome.faults:
            self._outcome.faults.append(words)

    # ------------------------------------------------------------------------------------------------- end

    def _keep_logs(self) -> None:
        """Ray's, which go with its folder; and what they say of replays."""
        note = self._service.data / "ray-folder"
        if not note.is_file():
            return
        logs = Path(note.read_text(), "session_latest", "logs")
        kept = self._folder / f"ray-logs-{len(list(self._folder.glob('ray-logs-*')))}"
        with contextlib.suppress(OSError, shutil.Error):
            shutil.copytree(logs.resolve(), kept)
        for file in kept.rglob("*"):
            if file.is_file() and MISMATCH in file.read_text(errors="replace"):
                self._fault(f"{file.name} says that a replay {MISMATCH}")

    def _stop(self) -> None:
        process = self._service.process
        if process is None:
            return
        self._keep_logs()
        tree = self._service.tree() if process.poll() is None else []
        try:
            code = self._service.stop()
        except Exception as error:
            self._fault(f"it did not stop: {error!r}")
        else:
            if code != 0:
                self._fault(f"it ended with exit code {code}: {''.join(self._service.stderr[-3:])}")
        if left := left_over(tree):
            self._fault(f"left over after the end: {left}")
            for one in left:
                with contextlib.suppress(psutil.Error):
                    one.kill()


class _Restart(threading.Thread):
    """`up` once more, while clients are being watched."""

    def __init__(self, service: Service) -> None:
        super().__init__(name="restart", daemon=True)
        self._service = service
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._service.start()
        except BaseException as error:
            self.error = error


__all__ = ["Hit", "Outcome", "Run"]
