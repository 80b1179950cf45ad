"""Past the limits of a whole service: a client that does not wait sees 429, and the SDK succeeds in the end."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from tinker import types

from tests.e2e.conftest import Served, served
from tests.support import sdk
from tests.support.requests import datums

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

ADAM = types.AdamParams(learning_rate=1e-3)
MAX_MODEL_OPS = 4
OPS = 40


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from served(tmp_path_factory.mktemp("limits"), limits={"max_model_ops": MAX_MODEL_OPS})


@dataclass(frozen=True)
class Answer:
    status: int
    retry_after: str | None
    body: dict[str, object]


def post(at: Served, endpoint: str, body: dict[str, object]) -> Answer:
    request = urllib.request.Request(
        f"{at.service.http}/api/v1/{endpoint}",
        json.dumps(body).encode(),
        {"content-type": "application/json", "x-api-key": at.service.api_key},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return Answer(response.status, None, json.loads(response.read()))
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.headers["retry-after"], json.loads(error.read()))


def step(at: Served, model_id: str, seq_id: int) -> Answer:
    adam = ADAM.model_dump(exclude_none=True)
    body = {"model_id": model_id, "seq_id": seq_id, "type": "optim_step", "adam_params": adam}
    return post(at, "optim_step", body)


def test_a_client_that_does_not_wait_is_told_to_and_loses_nothing(at: Served) -> None:
    model_id = sdk.model_id(sdk.training_client(at.service))
    time.sleep(1)  # until the model's creation is reported as done
    # The last number first: all of them wait for number 1, so that what is past the limit is so for certain.
    answers = {seq_id: step(at, model_id, seq_id) for seq_id in range(OPS, 1, -1)}
    accepted = [seq_id for seq_id, answer in answers.items() if answer.status == 200]
    assert accepted == list(range(OPS, OPS - MAX_MODEL_OPS, -1))
    for seq_id, answer in answers.items():
        if seq_id not in accepted:
            assert answer.status == 429
            assert 0 < float(str(answer.retry_after)) <= 60
            assert answer.body["queue_state"] == "paused_capacity"
            assert "the limit is 4 (limits.max_model_ops)" in str(answer.body["queue_state_reason"])
    deadline = time.monotonic() + sdk.WAIT_S
    for seq_id in range(1, OPS + 1):
        while (answer := step(at, model_id, seq_id)).status == 429:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert answer.body["request_id"] == f"{model_id}#{seq_id}"
    for seq_id in range(1, OPS + 1):
        result = post(at, "retrieve_future", {"request_id": f"{model_id}#{seq_id}"})
        assert (result.status, result.body["metrics"]["step"]) == (200, seq_id)  # type: ignore[index]


def test_the_sdk_sends_ten_times_the_limit_at_once_and_succeeds(at: Served) -> None:
    client = sdk.training_client(at.service)
    tokens, inputs = datums((5, 9), seed=1)
    data = [sdk.sdk_datum(t, i.tensors) for t, i in zip(tokens, inputs, strict=True)]
    calls = [client.forward_backward(data, "cross_entropy") for _ in range(OPS - 1)]
    last = client.optim_step(ADAM)
    assert last.result(timeout=300).metrics["window_calls"] == OPS - 1
    first, *others = [sdk.logprobs(call.result(timeout=sdk.WAIT_S)) for call in calls]
    assert all(sdk.equal(first, other) for other in others)
