"""The whole service on this machine: broker, Ray, Serve; started, watched and stopped as one.

Whatever is started here is stopped here, also when the start fails half-way or a signal comes at any moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bus import lease
from bus.connection import BrokerError, Credentials, connect
from bus.embedded import EmbeddedBroker
from bus.streams import ensure_streams
from bus.tables import Tables
from runtime import broker_tenants
from runtime import keys as key_file
from runtime.config import Settings, stream_limits
from runtime.keys import Keys
from runtime.services import START_PATIENCE_S, patiently

GROUP = "main"
"""This release runs one group."""

BROKER_FOLDER = "nats"
"""The embedded broker's folder in the data folder."""

READY_TIMEOUT_S = 900.0
DRAIN_TIMEOUT_S = 15.0
LOGICAL_CPUS = 16
"""Ray's CPU claims are logical here: small machines have to fit every replica and rank."""

OBJECT_STORE_BYTES = 512 * 1024 * 1024
GRPC_MAX_BYTES = 2**31 - 1
"""What gRPC carries in one message at most; `http.max_body_bytes` is the limit that clients see."""


class StartFailed(RuntimeError):
    """The service did not come up; the message says what would help."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    http: str
    nats: str
    metrics: str
    keys: Keys

    def ready_line(self) -> str:
        return f"ready http={self.http} nats={self.nats} metrics={self.metrics}"


@contextlib.contextmanager
def running(settings: Settings, say: Callable[[str], None]) -> Iterator[Endpoints]:
    """Start everything, and stop it at the end of the context. `say` gets a word of progress now and then."""
    data = Path(settings.data).resolve()
    data.mkdir(parents=True, exist_ok=True)
    keys = key_file.load(settings)
    if settings.http.port:
        _check_free(settings.http.host, settings.http.port)
    with contextlib.ExitStack() as stack:
        say("starting the broker")
        nats_url, credentials = stack.enter_context(_broker(settings, data, keys, say))
        asyncio.run(_announce_start(nats_url, credentials, settings))
        say("starting Ray")
        gpus = stack.enter_context(ray_running(data))
        port = settings.http.port or _free_port(settings.http.host)
        say("starting the deployments")
        stack.enter_context(_serve(settings, keys, nats_url, credentials, port=port, gpus=gpus))
        asyncio.run(_until_ready(nats_url, credentials, say))
        host = "127.0.0.1" if settings.http.host in ("0.0.0.0", "::") else settings.http.host
        http = f"http://{host}:{port}"
        yield Endpoints(http=http, nats=nats_url, metrics=f"{http}/metrics", keys=keys)


@contextlib.contextmanager
def _broker(
    settings: Settings, data: Path, keys: Keys, say: Callable[[str], None]
) -> Iterator[tuple[str, Credentials | None]]:
    """The operator's broker, or an embedded one on the data folder."""
    nats = settings.nats
    if nats.url is not None:
        yield nats.url, Credentials(nats.user, nats.password or "") if nats.user else None
        return
    broker = EmbeddedBroker(data / BROKER_FOLDER, keys.nats_passwords(), port=nats.port or -1, say=say)
    endpoint = broker.start()
    try:
        with broker_tenants.followed(settings, broker, say):
            yield endpoint.url, endpoint.credentials
    finally:
        broker.stop()


@contextlib.contextmanager
def ray_running(data: Path) -> Iterator[bool]:
    """The cluster in RAY_ADDRESS, or a Ray of our own; whether it has GPUs. `data` gets its logs when we fail."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # A worker process a logical CPU, started ahead of need, would keep a small machine busy for half a minute.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    # What Serve looks at ten times a second changes a few times a day here, and the ranks want the cores.
    os.environ.setdefault("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.5")
    # A proxy that died counts as dead after three checks: at Serve's own pace after half a minute.
    os.environ.setdefault("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "1")
    os.environ.setdefault("RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S", "3")
    os.environ.setdefault("RAY_SERVE_PROXY_GRACEFUL_SHUTDOWN_TIMEOUT_S", "1")
    # Who does not answer would not end gracefully either.
    os.environ.setdefault("RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS", "1")
    # Between proxy and replica gRPC takes less CPU than actor calls do; the replica's own default limit is 4 MB.
    os.environ.setdefault("RAY_SERVE_PROXY_USE_GRPC", "1")
    os.environ.setdefault("RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH", str(GRPC_MAX_BYTES))
    # By default workers have niceness 15: whatever else runs on the machine, the clients included, would push the
    # ranks aside.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray would note every actor call, which is several a request, and keep the last 100,000 in memory.
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    # Its reporter looks at every process for a dashboard that nobody has open.
    os.environ.setdefault("REPORTER_UPDATE_INTERVAL_MS", "60000")
    # Its proxy listens before it knows our routes.
    os.environ.setdefault("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", "runtime.serve_proxy.middlewares")
    import ray

    quiet = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
    address = os.environ.get("RAY_ADDRESS")
    # Sockets live below Ray's folder, and their paths must stay short: not in the data folder.
    folder = None if address else _fresh_folder(data / "ray-folder")
    try:
        if address:
            ray.init(address=address, **quiet)
        else:
            ray.init(
                num_cpus=LOGICAL_CPUS,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=folder,
                **quiet,
            )
        _stop_on_signals()  # ray.init puts handlers of its own, which print a stack and exit
        yield ray.cluster_resources().get("GPU", 0) > 0
    except Exception:
        if folder is not None:
            shutil.copytree(Path(folder, "session_latest", "logs"), data / "logs", dirs_exist_ok=True)
        raise
    finally:
        ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _fresh_folder(note: Path) -> str:
    """A temporary folder, written down in `note` so that the next start removes it should we be killed."""
    if note.is_file():
        shutil.rmtree(note.read_text(), ignore_errors=True)
    folder = tempfile.mkdtemp(prefix="tinkerbus-ray-")
    note.write_text(folder)
    return folder


@contextlib.contextmanager
def _serve(
    settings: Settings,
    keys: Keys,
    nats_url: str,
    credentials: Credentials | None,
    *,
    port: int,
    gpus: bool,
) -> Iterator[None]:
    from ray import serve

    from runtime.app import targets
    from runtime.deployments import Wiring

    wiring = Wiring(settings, keys, nats_url, credentials, GROUP, gpus)
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": settings.http.host, "port": port},
        logging_config={"log_level": "ERROR", "enable_access_log": False},
    )
    try:
        try:
            serve.run_many(targets(wiring))
        except RuntimeError as error:
            raise StartFailed(f"{error} The logs are in {Path(settings.data).resolve() / 'logs'}") from error
        yield
    finally:
        # Where a signal went to all processes at once, nobody may be left to shut Serve down gracefully.
        stopping = threading.Thread(target=serve.shutdown, daemon=True)
        stopping.start()
        stopping.join(DRAIN_TIMEOUT_S)


async def _announce_start(nats_url: str, credentials: Credentials | None, settings: Settings) -> None:
    """Put the streams in place, and take back what an earlier life said of being ready."""
    async with await connect(nats_url, credentials, name="up") as bus:

        async def announce() -> None:
            await ensure_streams(bus, **stream_limits(settings))
            tables = await Tables.open(bus)
            await tables.groups.delete(GROUP)
            if settings.nats.url is None:  # nobody else is on a broker of our own: we have locked its folder
                await lease.free(await lease.open_leases(bus), GROUP)

        await patiently(announce, for_s=START_PATIENCE_S)


async def _until_ready(nats_url: str, credentials: Credentials | None, say: Callable[[str], None]) -> None:
    said = ""
    deadline = time.monotonic() + READY_TIMEOUT_S
    async with await patiently(
        lambda: connect(nats_url, credentials, name="up"), for_s=START_PATIENCE_S
    ) as bus:
        tables = await patiently(lambda: Tables.open(bus), for_s=START_PATIENCE_S)
        while time.monotonic() < deadline:
            found = await patiently(lambda: tables.groups.get(GROUP), for_s=START_PATIENCE_S)
            status = found[0].status if found else "starting"
            if status == "ready":
                return
            if found and status == "refused":
                raise StartFailed(found[0].detail or "the group refuses to start")
            word = {"starting": "loading the base model and replaying the log"}.get(status, status)
            if word != said:
                say(word)
                said = word
            await asyncio.sleep(0.2)
    raise StartFailed(f"the group was not ready after {READY_TIMEOUT_S:g} s")


def _check_free(host: str, port: int) -> None:
    """Raises StartFailed where nothing can listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StartFailed(
                f"http.port {port} on {host} cannot be listened on ({error.strerror}): "
                "choose another one, or 0 for any that is free"
            ) from None


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


class Stopped(BaseException):
    """SIGTERM or Ctrl-C came."""


def _stop_on_signals() -> None:
    """The first signal unwinds what is running; later ones do not disturb that."""

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise Stopped

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)


def run(settings: Settings, say: Callable[[str], None], ready: Callable[[Endpoints], None]) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises StartFailed, BrokerError."""
    _stop_on_signals()
    with contextlib.suppress(Stopped), running(settings, say) as endpoints:
        ready(endpoints)
        while True:
            signal.pause()


__all__ = ["BrokerError", "Endpoints", "StartFailed", "run", "running"]
