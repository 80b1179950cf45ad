"""The Serve applications, put together: ingress, metrics, intake, one dispatcher per group, samplers."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import RunTarget

from runtime.deployments import (
    DispatcherPart,
    IntakePart,
    OpenedApp,
    SamplerPart,
    Wiring,
    ingress_app,
    metrics_app,
)

CPU_CLAIM = 0.1
"""Ray's CPU claims are logical; what a replica uses is its own."""

HEALTH: dict[str, Any] = {"health_check_period_s": 2, "health_check_timeout_s": 5}
"""A replica that is stopped is replaced after three checks, and one that only waits for a busy machine is not."""
PATIENT: dict[str, Any] = {"health_check_period_s": 2, "health_check_timeout_s": 30}
"""Of dispatchers, whose lease tells earlier, and whose replacement costs most."""
LOGGING: dict[str, Any] = {"log_level": "WARNING", "enable_access_log": False}

OPEN_REQUESTS = 10_000
"""Requests one ingress replica holds at a time; each waiting poll is one."""


def targets(wiring: Wiring) -> list[RunTarget]:
    """All applications. Only two are reachable over HTTP; the others live on the bus."""
    dispatchers = 1 + wiring.settings.recovery.standby_dispatchers
    samplers = wiring.settings.sampler.replicas
    return [
        _http("tinkerbus", "/", "Ingress", wiring, ingress_app, wiring.settings.http.replicas),
        _http("metrics", "/metrics", "Exporter", wiring, metrics_app, 1),
        _background("intake", IntakePart, wiring, 1, HEALTH),
        _background(f"group-{wiring.group}", DispatcherPart, wiring, dispatchers, PATIENT),
        *([_background("sampler", SamplerPart, wiring, samplers, PATIENT)] if samplers else []),
    ]


def _http(name: str, prefix: str, deployment: str, wiring: Wiring, opened: Any, replicas: int) -> RunTarget:
    def build() -> OpenedApp:
        return OpenedApp(lambda: opened(wiring))

    application = serve.deployment(
        serve.ingress(build)(),
        name=deployment,
        num_replicas=replicas,
        max_ongoing_requests=OPEN_REQUESTS,
        graceful_shutdown_timeout_s=3,
        graceful_shutdown_wait_loop_s=0.2,
        ray_actor_options={"num_cpus": CPU_CLAIM},
        **HEALTH,
    )
    return RunTarget(application.bind(), name=name, route_prefix=prefix, logging_config=LOGGING)


def _background(name: str, part: Any, wiring: Wiring, replicas: int, health: dict[str, Any]) -> RunTarget:
    application = serve.deployment(
        part,
        name=part.__name__,
        num_replicas=replicas,
        user_config={},
        graceful_shutdown_timeout_s=10,
        graceful_shutdown_wait_loop_s=0.2,
        ray_actor_options={"num_cpus": CPU_CLAIM},
        **health,
    )
    return RunTarget(application.bind(wiring), name=name, route_prefix=None, logging_config=LOGGING)
