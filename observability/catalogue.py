"""Every metric of the service: name, kind, unit, labels, meaning. No metric is defined anywhere else.

Names carry the prefix `tinkerbus_` and base units; labels are bounded: their values are listed here, or there
are as many as models are live, groups run, routes exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bus.events import VERBS

PREFIX = "tinkerbus_"


class NotInCatalogue(ValueError):
    """A metric, a label or a label's value that the catalogue does not list."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. A counter's name ends in `_total`; a histogram has buckets."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    labels: tuple[str, ...]
    meaning: str
    buckets: tuple[float, ...] = ()
    """Upper bounds, rising, in `unit`; +Inf follows by itself."""

    @property
    def help(self) -> str:
        return f"{self.meaning} Unit: {self.unit}."

    @property
    def sample_names(self) -> tuple[str, ...]:
        """The names its samples have when they are exposed."""
        if self.kind == "histogram":
            return tuple(f"{self.name}_{part}" for part in ("bucket", "count", "sum"))
        return (self.name,)


LABEL_VALUES: dict[str, tuple[str, ...] | None] = {
    "group": None,
    "model": None,
    "route": None,
    "version": None,
    "verb": (*VERBS, "forward"),
    "stage": ("queue", "ranks", "total"),
    "outcome": ("done", "failed_user", "failed_server"),
    "status": ("1xx", "2xx", "3xx", "4xx", "5xx"),
    "stream": ("submit", "ops", "results"),
    "sign": ("positive", "negative"),
    "estimator": ("k1", "k2", "k3"),
    "mode": ("forward", "forward_backward"),
}
"""The values a label may have; None where models, groups, routes or releases give them."""

_MODEL = ("group", "model")
_UP_TO_AN_HOUR = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0),
)


def _counter(name: str, unit: str, labels: tuple[str, ...], meaning: str) -> Metric:
    return Metric(f"{PREFIX}{name}_total", "counter", unit, labels, meaning)


def _gauge(name: str, unit: str, labels: tuple[str, ...], meaning: str) -> Metric:
    return Metric(f"{PREFIX}{name}", "gauge", unit, labels, meaning)


_GRADIENTS = (
    _gauge("gradient_norm", "1", _MODEL, "L2 norm of the gradient at the last step, before clipping."),
    _counter("steps", "steps", _MODEL, "Optimizer steps that ended, skipped ones included."),
    _counter("finalizations", "finalizations", _MODEL, "Gradient finalizations; one a step, always."),
    _counter("steps_skipped", "steps", _MODEL, "Steps vetoed because the gradient was not finite."),
    _gauge("window_calls", "calls", _MODEL, "forward_backward calls in the window of the last step."),
    _gauge("window_tokens", "tokens", _MODEL, "Tokens in the window of the last step."),
    _gauge("loss_per_token", "nats", _MODEL, "Loss of the last forward_backward by the tokens that count."),
)

_GAP = (
    _counter("rollout_tokens", "tokens", _MODEL, "Sampled tokens whose gap d = lp - q was measured."),
    _counter(
        "rollout_nonfinite_tokens",
        "tokens",
        _MODEL,
        "Sampled tokens whose gap is not a finite number; they stand in no other gap metric.",
    ),
    _counter(
        "rollout_gap_nats",
        "nats",
        (*_MODEL, "sign"),
        "Sum of |d| by the sign of d; added up it gives mean |d|, subtracted mean d, whose negative is k1.",
    ),
    _gauge("rollout_gap_mean_nats", "nats", _MODEL, "Mean d of the last request with rollout logprobs."),
    _gauge("rollout_gap_max_nats", "nats", _MODEL, "Largest |d| of the last request with rollout logprobs."),
    _counter("rollout_kl_k2_nats", "nats", _MODEL, "Sum of k2 = d^2/2 over sampled tokens."),
    _counter("rollout_kl_k3_nats", "nats", _MODEL, "Sum of k3 = e^d - 1 - d over sampled tokens."),
    _gauge(
        "rollout_kl_per_token_nats",
        "nats",
        (*_MODEL, "estimator"),
        "KL(rollout, train) of the last request with rollout logprobs: k1 = -d, k2, k3, mean over tokens.",
    ),
    _gauge(
        "rollout_effective_sample_ratio",
        "1",
        _MODEL,
        "Effective sample size of the last request by its tokens: (sum r)^2 / (n sum r^2), r = e^d.",
    ),
    _counter("clipped_tokens", "tokens", _MODEL, "Tokens whose ratio lay outside the loss's bounds."),
    _counter("clippable_tokens", "tokens", _MODEL, "Tokens that counted in a loss with ratio bounds."),
    _gauge("clipped_ratio", "1", _MODEL, "Share of clipped tokens in the last request with ratio bounds."),
)

_THROUGHPUT = (
    _counter(
        "tokens", "tokens", (*_MODEL, "mode"), "Tokens trained on (forward_backward) or scored (forward)."
    ),
    _counter("operations", "operations", ("group", "verb", "outcome"), "Operations with a result."),
    Metric(
        f"{PREFIX}operation_duration_seconds",
        "histogram",
        "seconds",
        ("group", "verb", "stage"),
        "Time of an operation: waiting for its turn (queue), on the ranks, from acceptance to result (total).",
        _UP_TO_AN_HOUR,
    ),
    _counter("ingress_requests", "requests", ("route", "status"), "HTTP requests by route template."),
)

_QUEUE = (
    _gauge("queue_depth", "operations", _MODEL, "Operations accepted and not yet finished."),
    _gauge("queue_oldest_age_seconds", "seconds", _MODEL, "Age of the oldest unfinished one; 0 if none."),
    _gauge("log_position", "1", ("group",), "Sequence number of the last log entry that was taken in."),
    _gauge("log_lag", "operations", ("group",), "Log entries behind that position's end of the log."),
    _counter("bus_published_messages", "messages", ("stream",), "Messages stored on a stream."),
    _counter("bus_consumed_messages", "messages", ("stream",), "Messages taken from a stream."),
)

_SAMPLER = (
    _counter("sampler_requests", "requests", ("group", "outcome"), "Sampling requests with a result."),
    _counter("sampler_tokens", "tokens", ("group",), "Tokens generated."),
    _gauge("sampler_running_sequences", "sequences", ("group",), "Sequences that are being generated."),
    _gauge("sampler_waiting_requests", "requests", ("group",), "Sampling requests that have not begun."),
    Metric(
        f"{PREFIX}sampler_request_duration_seconds",
        "histogram",
        "seconds",
        ("group",),
        "Time of a sampling request, from acceptance to result.",
        _UP_TO_AN_HOUR,
    ),
)

_HEALTH = (
    _gauge("ranks_alive", "ranks", ("group",), "Ranks that answer."),
    _counter("recoveries", "recoveries", ("group",), "Times the group was rebuilt."),
    _counter("replayed_operations", "operations", ("group",), "Operations run again after a rebuild."),
    _counter("replay_mismatches", "operations", ("group",), "Replayed results that differ from the first."),
    _counter("snapshots", "snapshots", ("group",), "Snapshots of a model's state that are on the disk."),
    _counter("snapshots_failed", "snapshots", ("group",), "Snapshots that could not be written."),
    _gauge("build_info", "1", ("version",), "Always 1; the label says what runs."),
)

_OF_THE_EXPORTER = (
    _gauge("reporting_processes", "processes", (), "Processes whose metrics arrived in the last 10 s."),
    _counter("refused_snapshots", "messages", (), "Metric messages that could not be read."),
)

RECORDED: dict[str, Metric] = {
    metric.name: metric for metric in (*_GRADIENTS, *_GAP, *_THROUGHPUT, *_QUEUE, *_SAMPLER, *_HEALTH)
}
"""What processes record, by name. Each has a label at least."""

METRICS: dict[str, Metric] = RECORDED | {metric.name: metric for metric in _OF_THE_EXPORTER}
"""All of them, by name."""

SAMPLES: dict[str, Metric] = {sample: metric for metric in METRICS.values() for sample in metric.sample_names}
"""The metric behind every name that is exposed."""


def check_label(name: str, value: str) -> None:
    """Raises NotInCatalogue for a label that is not listed, and for a value that a closed one does not have."""
    if name not in LABEL_VALUES:
        raise NotInCatalogue(f"no label is named {name!r}; known are {', '.join(LABEL_VALUES)}")
    allowed = LABEL_VALUES[name]
    if allowed is not None and value not in allowed:
        raise NotInCatalogue(f"label {name} is {value!r}; must be one of {', '.join(allowed)}")
