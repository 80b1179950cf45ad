"""What a scrape reads, and metrics of a process that has done a bit of everything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families

from observability import Exporter, Recorder, record_forward_backward, record_optim_step

IS_METRICS = {
    # Three tokens, lp = -1, -2, -3 and q = lp - 0.5, A = 1: every ratio is e^0.5.
    "loss:sum": -4.946164,
    "tokens:sum": 4.0,
    "loss_tokens:sum": 3.0,
    "rollout_tokens:sum": 3.0,
    "rollout_nonfinite_tokens:sum": 0.0,
    "rollout_gap:sum": 1.5,
    "rollout_gap_abs:sum": 1.5,
    "rollout_gap_abs:max": 0.5,
    "kl_k1:sum": -1.5,
    "kl_k2:sum": 0.375,
    "kl_k3:sum": 3 * 0.148721,
    "rollout_ratio:sum": 3 * 1.648721,
    "rollout_ratio_sq:sum": 3 * 2.718282,
    "clipped_tokens:sum": 3.0,
}


def value(exporter: Exporter, name: str, **labels: str) -> float | None:
    """The value of one series in the exporter's text, None where there is none."""
    found = [
        sample.value
        for family in text_string_to_metric_families(exporter.render().decode())
        for sample in family.samples
        if sample.name == name and sample.labels == labels
    ]
    assert len(found) <= 1, f"{name} {labels} is exposed {len(found)} times"
    return found[0] if found else None


async def eventually(holds: Callable[[], object], within_s: float = 5.0) -> None:
    """Wait until `holds()` is true. Fails with its last value."""
    deadline = asyncio.get_running_loop().time() + within_s
    while not (last := holds()):
        assert asyncio.get_running_loop().time() < deadline, f"still {last!r} after {within_s} s"
        await asyncio.sleep(0.02)


def train(recorder: Recorder, model: str) -> None:
    """One step of a model, with every metric of the dispatcher."""
    record_forward_backward(recorder, IS_METRICS, model=model)
    record_forward_backward(recorder, IS_METRICS, model=model, forward_only=True)
    record_optim_step(recorder, model=model, gradient_norm=1.25, window_calls=1, window_tokens=4)
    for verb in ("forward_backward", "optim_step"):
        recorder.inc("tinkerbus_operations_total", verb=verb, outcome="done")
        for stage, seconds in (("queue", 0.02), ("ranks", 0.2), ("total", 0.25)):
            recorder.observe("tinkerbus_operation_duration_seconds", seconds, verb=verb, stage=stage)
    recorder.set("tinkerbus_queue_depth", 2, model=model)
    recorder.set("tinkerbus_queue_oldest_age_seconds", 0.5, model=model)
    recorder.set("tinkerbus_log_position", 7)
    recorder.set("tinkerbus_log_lag", 1)
    recorder.set("tinkerbus_ranks_alive", 2)
    recorder.set("tinkerbus_build_info", 1, version="0.1.0")
    recorder.inc("tinkerbus_bus_consumed_messages_total", stream="ops")
    recorder.inc("tinkerbus_bus_published_messages_total", stream="results")


def sample(recorder: Recorder) -> None:
    """The samplers' part."""
    recorder.inc("tinkerbus_sampler_requests_total", outcome="done")
    recorder.inc("tinkerbus_sampler_tokens_total", 16)
    recorder.set("tinkerbus_sampler_running_sequences", 2)
    recorder.set("tinkerbus_sampler_waiting_requests", 1)
    recorder.observe("tinkerbus_sampler_request_duration_seconds", 0.1)


def serve_requests(recorder: Recorder) -> None:
    """The ingress's part."""
    recorder.inc("tinkerbus_ingress_requests_total", route="/api/v1/forward_backward", status="2xx")
    recorder.inc("tinkerbus_bus_published_messages_total", stream="ops")
