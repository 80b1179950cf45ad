"""`/metrics` of the whole service after some training says what happened, and promtool has no complaint."""

from __future__ import annotations

import shutil
import subprocess
import time
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tinker import types

from tests.e2e.conftest import Served
from tests.support import sdk
from tests.support.requests import datums

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LENGTHS = (7, 3, 11)


def scraped(served: Served) -> bytes:
    with urllib.request.urlopen(served.service.metrics, timeout=30) as response:
        body: bytes = response.read()
    return body


def values(body: bytes, name: str, **labels: str) -> list[float]:
    return [
        sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]


def test_training_shows_in_the_metrics(one_rank: Served) -> None:
    client = sdk.training_client(one_rank.service)
    model = sdk.model_id(client)
    tokens, inputs = datums(LENGTHS, loss="importance_sampling")
    targets = [i.tensors["target_tokens"] for i in inputs]
    plain = [sdk.sdk_datum(t, {"target_tokens": g}) for t, g in zip(tokens, targets, strict=True)]
    scored = sdk.logprobs(client.forward(plain, "cross_entropy").result(timeout=sdk.WAIT_S))
    rollouts = [
        sdk.sdk_datum(t, {"target_tokens": g, "logprobs": lp - 0.5, "advantages": i.tensors["advantages"]})
        for t, g, lp, i in zip(tokens, targets, scored, inputs, strict=True)
    ]
    calls = (1, 3, 2)
    for count in calls:
        for _ in range(count):
            client.forward_backward(rollouts, "importance_sampling")
        # A step of learning rate 0 moves nothing, so that every call measures the same gap.
        step = client.optim_step(types.AdamParams(learning_rate=0.0)).result(timeout=sdk.WAIT_S)

    n = sum(LENGTHS)
    deadline = time.monotonic() + 20  # processes report once a second
    while values(body := scraped(one_rank), "tinkerbus_steps_total", model=model) != [len(calls)]:
        assert time.monotonic() < deadline, body.decode()
        time.sleep(0.5)
    assert values(body, "tinkerbus_finalizations_total", model=model) == [len(calls)]
    assert values(body, "tinkerbus_gradient_norm", model=model) == [step.metrics["grad_norm"]]
    assert values(body, "tinkerbus_window_calls", model=model) == [calls[-1]]
    assert values(body, "tinkerbus_window_tokens", model=model) == [calls[-1] * n]
    assert values(body, "tinkerbus_tokens_total", model=model, mode="forward") == [n]
    assert values(body, "tinkerbus_tokens_total", model=model, mode="forward_backward") == [sum(calls) * n]
    assert values(body, "tinkerbus_rollout_tokens_total", model=model) == [sum(calls) * n]
    assert values(body, "tinkerbus_rollout_gap_mean_nats", model=model) == [pytest.approx(0.5, abs=1e-6)]
    assert values(body, "tinkerbus_queue_depth", model=model) == [0]
    assert (
        sum(values(body, "tinkerbus_operation_duration_seconds_count", verb="optim_step", stage="total")) >= 3
    )
    assert sum(values(body, "tinkerbus_operations_total", verb="forward_backward", outcome="done")) >= sum(
        calls
    )
    assert values(body, "tinkerbus_ranks_alive") == [1]


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian's prometheus) is not installed"
)
def test_promtool_has_no_complaint(one_rank: Served) -> None:
    check = subprocess.run(
        ["promtool", "check", "metrics"],
        input=scraped(one_rank),
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert (check.returncode, check.stdout, check.stderr) == (0, b"", b"")


def test_a_finished_sessions_models_leave_no_series(one_rank: Served) -> None:
    service = sdk.service_client(one_rank.service)
    client = service.create_lora_training_client(base_model="tiny", rank=4).result(timeout=sdk.WAIT_S)
    model = sdk.model_id(client)
    client.optim_step(types.AdamParams()).result(timeout=sdk.WAIT_S)
    deadline = time.monotonic() + 20
    while not values(scraped(one_rank), "tinkerbus_steps_total", model=model):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    service.close("success").result(timeout=sdk.WAIT_S)
    deadline = time.monotonic() + 20
    while model.encode() in (body := scraped(one_rank)):
        assert time.monotonic() < deadline, body.decode()
        time.sleep(0.5)
