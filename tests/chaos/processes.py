"""Which process of a running service is of which kind: by its place in the tree of `up` and its title."""

from __future__ import annotations

import contextlib
import time

import psutil

from tests.chaos.schedule import Kind
from tests.support.service import Service

TITLES: dict[Kind, str] = {
    Kind.RANK: "ray::Rank",
    Kind.DISPATCHER: "ray::ServeReplica:group-main:DispatcherPart",
    Kind.INGRESS: "ray::ServeReplica:tinkerbus:Ingress",
    Kind.INTAKE: "ray::ServeReplica:intake:IntakePart",
    Kind.EXPORTER: "ray::ServeReplica:metrics:Exporter",
    Kind.PROXY: "ray::ProxyActor",
    Kind.CONTROLLER: "ray::ServeController",
    Kind.BROKER: "nats-server",
}
"""How the command line of a kind's processes begins; of the broker, how its program is called."""


class NotThere(RuntimeError):
    """No process of the kind came up in time."""


def of_kind(service: Service, kind: Kind) -> list[psutil.Process]:
    """Running processes of the kind, oldest first. A replica that is stopped may stand beside its successor."""
    found = []
    for process in service.tree():
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            line = process.cmdline()
            title = process.name() if kind is Kind.BROKER else (line[0] if line else "")
            if title.startswith(TITLES[kind]):
                found.append((process.create_time(), process))
    return [process for _, process in sorted(found, key=lambda pair: pair[0])]


def target(service: Service, kind: Kind, which: float, within_s: float = 60.0) -> psutil.Process:
    """The one to hit: of ranks any, of dispatchers the one that acts, of all others the newest. Raises NotThere."""
    if kind is Kind.DISPATCHER:
        return service.acting_dispatcher()
    deadline = time.monotonic() + within_s
    while True:
        found = of_kind(service, kind)
        if found:
            return found[int(which * len(found))] if kind is Kind.RANK else found[-1]
        if time.monotonic() > deadline:
            raise NotThere(f"there is no {kind} process after {within_s:g} s")
        time.sleep(0.05)
