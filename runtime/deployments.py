"""The Ray Serve deployments: thin shells that connect, start one of our parts, and report its health.

A part that works the bus runs as a background task, started after `reconfigure`; when it ends by itself the replica
reports as unhealthy and Serve replaces it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from bus.backlog import Backlog
from bus.connection import Bus, Credentials, connect
from bus.lease import Lease, open_leases
from bus.ledger import Ledger
from bus.log import OpsLog
from bus.results import Results
from bus.streams import ensure_streams
from bus.tables import Tables
from observability.publisher import MetricsPublisher
from observability.recorder import Recorder
from runtime.admission import Admission
from runtime.config import Settings, stream_limits
from runtime.keys import Keys
from runtime.services import START_PATIENCE_S, Services, patiently

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

SERVE_NAMESPACE = "serve"
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Wiring:
    """What every deployment gets: settings, keys, and where the broker is."""

    settings: Settings
    keys: Keys
    nats_url: str
    credentials: Credentials | None
    group: str
    gpus: bool = False

    async def connect(self, name: str) -> Bus:
        """A connection with the streams in place."""
        bus = await patiently(
            lambda: connect(self.nats_url, self.credentials, name=name), for_s=START_PATIENCE_S
        )
        await patiently(lambda: ensure_streams(bus, **stream_limits(self.settings)), for_s=START_PATIENCE_S)
        return bus

    async def tables(self, bus: Bus) -> Tables:
        return await patiently(lambda: Tables.open(bus), for_s=START_PATIENCE_S)

    async def ledger(self, bus: Bus) -> Ledger:
        return await patiently(lambda: Ledger.open(bus, self.group), for_s=START_PATIENCE_S)

    @contextlib.asynccontextmanager
    async def admission(self, bus: Bus, tables: Tables, ledger: Ledger) -> AsyncIterator[Admission]:
        backlog = await patiently(
            lambda: Backlog.open(bus, tables.backlogs, self.group), for_s=START_PATIENCE_S
        )
        try:
            yield Admission(self.settings.limits, backlog, ledger)
        finally:
            await backlog.close()


def process_name(role: str) -> str:
    """Of this replica, for metrics and the broker's connection list."""
    return f"{role}-{os.getpid()}"


class BackgroundPart:
    """Base of deployments whose work is a task that never ends by itself."""

    role = "part"

    def __init__(self, wiring: Wiring) -> None:
        logging.getLogger().setLevel(logging.INFO)
        self._wiring = wiring
        self._task: asyncio.Task[None] | None = None

    async def work(self, bus: Bus, recorder: Recorder) -> None:
        raise NotImplementedError

    async def reconfigure(self, _: Any) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with await self._wiring.connect(self.role) as bus:
            recorder = Recorder(process_name(self.role), group=self._wiring.group)
            async with MetricsPublisher(bus, recorder):
                await self.work(bus, recorder)

    async def check_health(self) -> None:
        if self._task is not None and self._task.done():
            await self._task  # raises what ended it
            raise RuntimeError(f"{self.role} ended by itself")

    async def __del__(self) -> None:
        """Serve calls this at the end of a graceful shutdown."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._task


class DispatcherPart(BackgroundPart):
    """Log → sequencer → hub → ranks → results, for one group.

    Of its replicas the one that has the lease acts. The others stand by, with everything imported.
    """

    role = "dispatcher"

    def __init__(self, wiring: Wiring) -> None:
        super().__init__(wiring)
        # Torch takes seconds to import, and holds the interpreter for long: here Serve does not yet ask whether we
        # are well.
        importlib.import_module("runtime.dispatcher")

    async def work(self, bus: Bus, recorder: Recorder) -> None:
        from runtime import base_model
        from runtime.dispatcher import Dispatcher, group_config

        settings, group = self._wiring.settings, self._wiring.group
        services = Services(
            settings=settings,
            log=OpsLog(bus, group),
            results=Results(bus),
            tables=await self._wiring.tables(bus),
            ledger=await self._wiring.ledger(bus),
            recorder=recorder,
            leases=await patiently(lambda: open_leases(bus), for_s=START_PATIENCE_S),
        )
        lease = await Lease.acquire(services.leases, group, _own_name(), settings.recovery.lease_s)
        async with lease.kept():
            if lease.predecessor:
                await asyncio.to_thread(_kill, lease.predecessor)
            folder = await asyncio.to_thread(base_model.folder, settings)
            config = group_config(settings, folder, gpus=self._wiring.gpus)
            await Dispatcher(services, group, folder, config).run(lease)


def _own_name() -> str:
    """Of this replica, as it stands in a lease: its process, and its actor's name."""
    from ray import serve

    return f"{os.getpid()} {serve.get_replica_context().replica_id.to_full_id_str()}"


def _kill(holder: str) -> None:
    """End a replica that let its lease run out: it is dead, or stopped, and its ranks hold devices that we need."""
    import ray

    _, _, actor = holder.partition(" ")
    try:
        ray.kill(ray.get_actor(actor, namespace=SERVE_NAMESPACE))
    except ValueError:
        return  # there is no such actor any more
    logging.getLogger(__name__).warning("killed %s, which let its lease run out", holder)


class IntakePart(BackgroundPart):
    """SUBMIT → OPS, for event clients. Ends sessions that fell silent as well, being one and always there."""

    role = "intake"

    async def work(self, bus: Bus, recorder: Recorder) -> None:
        from runtime.intake import Intake
        from runtime.session_expiry import SessionExpiry

        tables, ledger = await self._wiring.tables(bus), await self._wiring.ledger(bus)
        log = OpsLog(bus, self._wiring.group, ledger)
        async with self._wiring.admission(bus, tables, ledger) as admission:
            sessions = SessionExpiry(tables, log, admission, self._wiring.settings.sessions.expire_after_s)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(Intake(bus, log, tables, Results(bus), admission, recorder).run())
                tasks.create_task(sessions.run())


class SamplerPart(BackgroundPart):
    """Samples for one group, in a process of its own: never behind training, and not on the log."""

    role = "sampler"

    async def work(self, bus: Bus, recorder: Recorder) -> None:
        from runtime.sampler.server import SamplerServer

        settings = self._wiring.settings

        def engine() -> Any:
            # Seconds of imports, and the base model's memory: not before somebody samples.
            from runtime import base_model
            from runtime.sampler.engine import TransformersEngine

            sampler = settings.sampler
            return TransformersEngine(
                base_model.folder(settings),
                max_running=sampler.max_running,
                max_samplers=sampler.max_samplers,
            )

        tables = await self._wiring.tables(bus)
        process = f"{process_name(self.role)}-{secrets.token_hex(4)}"
        await SamplerServer(
            bus,
            self._wiring.group,
            process,
            settings.sampler,
            tables.samples,
            Results(bus),
            recorder,
            engine,
        ).run()


class OpenedApp:
    """An ASGI application that is built, asynchronously, when the server's lifespan starts."""

    def __init__(self, opened: Callable[[], contextlib.AbstractAsyncContextManager[AsgiApp]]) -> None:
        self._opened = opened
        self._app: AsgiApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            assert self._app is not None, "requests come after the lifespan has started"
            await self._app(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        async with contextlib.AsyncExitStack() as stack:
            try:
                self._app = await stack.enter_async_context(self._opened())
            except Exception as error:
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                raise
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})


@contextlib.asynccontextmanager
async def ingress_app(wiring: Wiring) -> AsyncIterator[AsgiApp]:
    """The Tinker API over one connection of its own."""
    from runtime.ingress.app import build
    from runtime.ingress.deps import Deps
    from runtime.ingress.heartbeats import Heartbeats
    from runtime.ingress.readiness import readiness

    async with await wiring.connect("ingress") as bus:
        recorder = Recorder(process_name("ingress"), group=wiring.group)
        async with MetricsPublisher(bus, recorder):
            tables, ledger = await wiring.tables(bus), await wiring.ledger(bus)
            async with wiring.admission(bus, tables, ledger) as admission:
                yield build(
                    Deps(
                        settings=wiring.settings,
                        bus=bus,
                        log=OpsLog(bus, wiring.group, ledger),
                        results=Results(bus),
                        tables=tables,
                        ledger=ledger,
                        admission=admission,
                        keys=wiring.keys,
                        heartbeats=Heartbeats(tables.heartbeats, wiring.settings.sessions.expire_after_s),
                        ready=readiness(tables, wiring.group),
                        recorder=recorder,
                    )
                )


@contextlib.asynccontextmanager
async def metrics_app(wiring: Wiring) -> AsyncIterator[AsgiApp]:
    """One `/metrics` for the whole service."""
    from observability.exporter import CONTENT_TYPE, Exporter

    async with await wiring.connect("exporter") as bus, Exporter(bus) as exporter:

        async def metrics(scope: Scope, receive: Receive, send: Send) -> None:
            del receive
            right = scope["method"] == "GET"
            body = exporter.render() if right else b"only GET is answered here\n"
            kind = CONTENT_TYPE if right else "text/plain"
            headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 200 if right else 405, "headers": headers})
            await send({"type": "http.response.body", "body": body})

        yield metrics
