"""From a request's metrics to the catalogue's."""

from __future__ import annotations

import math

import pytest

from observability import Recorder, record_forward_backward, record_optim_step
from tests.observability.scraping import IS_METRICS

M = {"group": "g", "model": "m"}


@pytest.fixture
def recorder() -> Recorder:
    return Recorder("dispatcher", group="g")


def read(recorder: Recorder, name: str, **more: str) -> float | None:
    labels = M | more
    return next(
        (
            s.value
            for s in recorder.snapshot().samples
            if s.name == f"tinkerbus_{name}" and s.labels == labels
        ),
        None,
    )


def test_rollout_logprobs_half_a_nat_lower_show_a_mean_gap_of_one_half(recorder) -> None:
    record_forward_backward(recorder, IS_METRICS, model="m")
    assert read(recorder, "rollout_gap_mean_nats") == pytest.approx(0.5)
    assert read(recorder, "rollout_gap_max_nats") == 0.5
    assert read(recorder, "rollout_kl_per_token_nats", estimator="k1") == pytest.approx(-0.5)
    assert read(recorder, "rollout_kl_per_token_nats", estimator="k2") == pytest.approx(0.125)
    assert read(recorder, "rollout_kl_per_token_nats", estimator="k3") == pytest.approx(0.148721)
    assert read(recorder, "rollout_effective_sample_ratio") == pytest.approx(1.0)
    assert read(recorder, "loss_per_token") == pytest.approx(-1.648721)
    assert read(recorder, "clipped_ratio") == 1.0
    assert read(recorder, "tokens_total", mode="forward_backward") == 4


def test_gap_sums_by_sign_give_back_both_the_sum_and_the_absolute_sum(recorder) -> None:
    mixed = IS_METRICS | {"rollout_gap:sum": -0.5, "rollout_gap_abs:sum": 2.5, "kl_k1:sum": 0.5}
    record_forward_backward(recorder, mixed, model="m")  # gaps 1, -0.5, -1
    record_forward_backward(recorder, mixed, model="m")
    positive = read(recorder, "rollout_gap_nats_total", sign="positive")
    negative = read(recorder, "rollout_gap_nats_total", sign="negative")
    assert (positive, negative) == (2.0, 3.0)
    assert read(recorder, "rollout_tokens_total") == 6
    assert read(recorder, "rollout_kl_k2_nats_total") == pytest.approx(0.75)
    assert read(recorder, "rollout_kl_k3_nats_total") == pytest.approx(2 * 3 * 0.148721)


def test_a_forward_measures_the_gap_and_leaves_the_loss_alone(recorder) -> None:
    record_forward_backward(recorder, IS_METRICS, model="m", forward_only=True)
    assert read(recorder, "rollout_gap_mean_nats") == pytest.approx(0.5)
    assert read(recorder, "loss_per_token") is None
    assert read(recorder, "clipped_ratio") is None
    assert read(recorder, "tokens_total", mode="forward") == 4


def test_a_supervised_request_has_no_gap(recorder) -> None:
    metrics = {"loss:sum": 6.0, "tokens:sum": 5.0, "loss_tokens:sum": 3.0, "weights:sum": 3.0}
    record_forward_backward(recorder, metrics, model="m")
    assert read(recorder, "loss_per_token") == 2.0
    assert read(recorder, "rollout_gap_mean_nats") is None
    record_forward_backward(recorder, metrics | {"loss_tokens:sum": 0.0, "loss:sum": 0.0}, model="m")
    assert read(recorder, "loss_per_token") == 2.0  # nothing counted, nothing said


def test_values_that_are_not_finite_spoil_no_counter(recorder) -> None:
    overflowed = IS_METRICS | {"loss:sum": math.nan, "rollout_ratio_sq:sum": math.inf, "kl_k3:sum": math.inf}
    record_forward_backward(recorder, overflowed, model="m")
    assert math.isnan(read(recorder, "loss_per_token") or 0)
    assert read(recorder, "rollout_nonfinite_tokens_total") == 3
    assert read(recorder, "rollout_tokens_total") is None
    record_forward_backward(recorder, IS_METRICS, model="m")
    assert read(recorder, "rollout_tokens_total") == 3


def test_a_step_reports_its_window_and_whether_it_was_skipped(recorder) -> None:
    record_optim_step(recorder, model="m", gradient_norm=2.5, window_calls=3, window_tokens=96)
    record_optim_step(
        recorder, model="m", gradient_norm=math.inf, window_calls=1, window_tokens=8, skipped=True
    )
    assert read(recorder, "steps_total") == 2
    assert read(recorder, "finalizations_total") == 2
    assert read(recorder, "steps_skipped_total") == 1
    assert read(recorder, "gradient_norm") == math.inf
    assert (read(recorder, "window_calls"), read(recorder, "window_tokens")) == (1, 8)


def test_the_loss_hub_reports_every_key_that_is_read_here(recorder) -> None:
    import torch

    from loss_hub import DatumInputs, check, evaluate

    lp_N = torch.tensor([-5.0, -1.0, -2.0, -3.0])
    inputs = {
        "target_tokens": torch.arange(4),
        "logprobs": torch.tensor([0.0, -1.5, -2.5, -3.5]),
        "advantages": torch.tensor([0.0, 1.0, 1.0, 1.0]),
    }
    for name in ("ppo", "cispo", "importance_sampling", "dro"):
        request = check(name, {}, [DatumInputs(4, inputs)])
        metrics = evaluate(request.loss, lp_N, request.batch([0]), request.config).metrics
        record_forward_backward(recorder, metrics, model="m")
    assert read(recorder, "rollout_tokens_total") == 4 * 3
    assert read(recorder, "rollout_gap_mean_nats") == pytest.approx(0.5)
    assert read(recorder, "clippable_tokens_total") == 2 * 3
    assert read(recorder, "clipped_tokens_total") == 3  # ppo's bounds end at 1.2, cispo's at 4
