"""What the results of training operations say, in the catalogue's metrics.

Request metrics come with keys `name:reduction`, as the loss hub makes them; sums stay sums, so that any number
of requests adds up exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from observability.recorder import Recorder

_GAP_SUMS = (
    *("rollout_gap:sum", "rollout_gap_abs:sum", "rollout_gap_abs:max"),
    *("kl_k1:sum", "kl_k2:sum", "kl_k3:sum", "rollout_ratio:sum", "rollout_ratio_sq:sum"),
)


def record_forward_backward(
    recorder: Recorder, metrics: Mapping[str, float], *, model: str, forward_only: bool = False
) -> None:
    """Record one request's metrics. A `forward` moves neither the loss nor the clipping metrics."""
    mode = "forward" if forward_only else "forward_backward"
    recorder.inc("tinkerbus_tokens_total", metrics["tokens:sum"], model=model, mode=mode)
    counted = metrics["loss_tokens:sum"]
    if not forward_only and counted:
        recorder.set("tinkerbus_loss_per_token", metrics["loss:sum"] / counted, model=model)
        if "clipped_tokens:sum" in metrics:
            clipped = metrics["clipped_tokens:sum"]
            recorder.inc("tinkerbus_clipped_tokens_total", clipped, model=model)
            recorder.inc("tinkerbus_clippable_tokens_total", counted, model=model)
            recorder.set("tinkerbus_clipped_ratio", clipped / counted, model=model)
    if "rollout_tokens:sum" in metrics:
        _record_gap(recorder, metrics, model)


def record_optim_step(
    recorder: Recorder,
    *,
    model: str,
    gradient_norm: float,
    window_calls: int,
    window_tokens: int,
    finalizations: int = 1,
    skipped: bool = False,
) -> None:
    """Record one optimizer step that ended; `gradient_norm` is before clipping."""
    recorder.inc("tinkerbus_steps_total", model=model)
    recorder.inc("tinkerbus_finalizations_total", finalizations, model=model)
    recorder.inc("tinkerbus_steps_skipped_total", int(skipped), model=model)
    recorder.set("tinkerbus_gradient_norm", gradient_norm, model=model)
    recorder.set("tinkerbus_window_calls", window_calls, model=model)
    recorder.set("tinkerbus_window_tokens", window_tokens, model=model)


def _record_gap(recorder: Recorder, metrics: Mapping[str, float], model: str) -> None:
    tokens = metrics["rollout_tokens:sum"]
    unmeasured = metrics["rollout_nonfinite_tokens:sum"]
    if not all(math.isfinite(metrics[key]) for key in _GAP_SUMS):  # e^d overflowed: a counter cannot hold it
        tokens, unmeasured = 0.0, unmeasured + tokens
    recorder.inc("tinkerbus_rollout_nonfinite_tokens_total", unmeasured, model=model)
    if not tokens:
        return
    total, total_abs = metrics["rollout_gap:sum"], metrics["rollout_gap_abs:sum"]
    by_sign = {"positive": (total_abs + total) / 2, "negative": (total_abs - total) / 2}
    recorder.inc("tinkerbus_rollout_tokens_total", tokens, model=model)
    for sign, amount in by_sign.items():  # rounding may leave a −0.0000…1
        recorder.inc("tinkerbus_rollout_gap_nats_total", max(0.0, amount), model=model, sign=sign)
    recorder.inc("tinkerbus_rollout_kl_k2_nats_total", metrics["kl_k2:sum"], model=model)
    recorder.inc("tinkerbus_rollout_kl_k3_nats_total", max(0.0, metrics["kl_k3:sum"]), model=model)

    recorder.set("tinkerbus_rollout_gap_mean_nats", total / tokens, model=model)
    recorder.set("tinkerbus_rollout_gap_max_nats", metrics["rollout_gap_abs:max"], model=model)
    for estimator in ("k1", "k2", "k3"):
        mean = metrics[f"kl_{estimator}:sum"] / tokens
        recorder.set("tinkerbus_rollout_kl_per_token_nats", mean, model=model, estimator=estimator)
    effective = metrics["rollout_ratio:sum"] ** 2 / (tokens * metrics["rollout_ratio_sq:sum"])
    recorder.set("tinkerbus_rollout_effective_sample_ratio", effective, model=model)
