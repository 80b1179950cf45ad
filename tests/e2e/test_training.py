"""What a user of the SDK relies on while training: values, order, identity, errors. One server, a model a test."""

from __future__ import annotations

import asyncio
import json
import math
import time
import urllib.error
import urllib.request

import pytest
import tinker
import torch
from tinker import types
from tinker.proto import tinker_public_pb2

from tests.e2e.conftest import Served
from tests.support import dumps, sdk
from tests.support.requests import datums

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LENGTHS = (7, 3, 11)
ADAM = types.AdamParams(learning_rate=1e-3)
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")


def batch(
    loss: str = "cross_entropy", *, seed: int = 5, lengths: tuple[int, ...] = LENGTHS
) -> list[types.Datum]:
    tokens, inputs = datums(lengths, loss=loss, seed=seed)
    return [sdk.sdk_datum(t, i.tensors) for t, i in zip(tokens, inputs, strict=True)]


def warmed(client: tinker.TrainingClient) -> None:
    """One step, after which B is no longer 0."""
    client.forward_backward(batch(seed=2), "cross_entropy")
    client.optim_step(ADAM).result(timeout=sdk.WAIT_S)


def test_forward_gives_the_bits_of_forward_backward_for_every_loss(one_rank: Served) -> None:
    client = sdk.training_client(one_rank.service)
    warmed(client)
    for loss in LOSSES:
        scored = client.forward(batch(loss), loss).result(timeout=sdk.WAIT_S)
        trained = client.forward_backward(batch(loss), loss).result(timeout=sdk.WAIT_S)
        assert sdk.equal(sdk.logprobs(scored), sdk.logprobs(trained)), loss
        assert scored.metrics == trained.metrics, loss


def test_forward_between_two_calls_changes_no_bit_of_the_next_step(one_rank: Served) -> None:
    steps = []
    for disturbed in (False, True):
        client = sdk.training_client(one_rank.service)
        warmed(client)
        client.forward_backward(batch(seed=6), "cross_entropy")
        if disturbed:
            client.forward(batch(seed=7), "cross_entropy")
        client.forward_backward(batch(seed=8), "cross_entropy")
        client.optim_step(ADAM).result(timeout=sdk.WAIT_S)
        steps.append(dumps.read(one_rank.dumps, sdk.model_id(client), 1))
    assert steps[0].keys() == steps[1].keys()
    for kind, tensors in steps[0].items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, steps[1][kind][name]), (kind, name)


def test_unawaited_calls_end_with_the_bits_of_awaited_ones(one_rank: Served) -> None:
    steps = []
    for awaited in (False, True):
        client = sdk.training_client(one_rank.service)
        pending = []
        for seed in (1, 2):
            for future in (
                client.forward_backward(batch(seed=seed), "cross_entropy"),
                client.optim_step(ADAM),
            ):
                pending.append(future)
                if awaited:
                    future.result(timeout=sdk.WAIT_S)
        for future in pending:
            future.result(timeout=sdk.WAIT_S)
        steps.append(dumps.read(one_rank.dumps, sdk.model_id(client), 1))
    for kind in ("gradient", "after", "exp_avg", "exp_avg_sq"):
        for name, tensor in steps[0][kind].items():
            assert torch.equal(tensor, steps[1][kind][name]), (kind, name)


@pytest.mark.parametrize(
    ("loss", "config", "advantage", "per_token"),
    [
        # lp − q = 0.5 at every token, so the ratio is e^0.5 = 1.648721…
        ("importance_sampling", {}, 2.0, -2 * math.exp(0.5)),
        ("ppo", {}, 2.0, -2 * 1.2),
        ("ppo", {}, -2.0, 2 * math.exp(0.5)),
        ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}, 2.0, -2 * math.exp(0.5)),
        ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}, 2.0, -2 * 1.5),
    ],
)
def test_ratio_losses_have_their_closed_forms(
    one_rank: Served, loss: str, config: dict[str, float], advantage: float, per_token: float
) -> None:
    client = sdk.training_client(one_rank.service)
    tokens, inputs = datums(LENGTHS)
    targets = [i.tensors["target_tokens"] for i in inputs]
    plain = [sdk.sdk_datum(t, {"target_tokens": g}) for t, g in zip(tokens, targets, strict=True)]
    scored = sdk.logprobs(client.forward(plain, "cross_entropy").result(timeout=sdk.WAIT_S))
    probes = [
        sdk.sdk_datum(
            t, {"target_tokens": g, "logprobs": lp - 0.5, "advantages": torch.full_like(lp, advantage)}
        )
        for t, g, lp in zip(tokens, targets, scored, strict=True)
    ]
    result = client.forward_backward(probes, loss, config).result(timeout=sdk.WAIT_S)
    n = sum(LENGTHS)
    assert result.metrics["loss:sum"] / n == pytest.approx(per_token, abs=1e-5)
    # The rollout/train gap of behaviours.md: mean |d| 0.5, k1 −0.5, k2 0.125, k3 e^0.5 − 1.5.
    assert result.metrics["rollout_gap_abs:sum"] / n == pytest.approx(0.5, abs=1e-6)
    assert result.metrics["kl_k1:sum"] / n == pytest.approx(-0.5, abs=1e-6)
    assert result.metrics["kl_k2:sum"] / n == pytest.approx(0.125, abs=1e-6)
    assert result.metrics["kl_k3:sum"] / n == pytest.approx(math.exp(0.5) - 1.5, abs=1e-6)


def test_cross_entropy_is_a_plain_sum_without_a_shift(one_rank: Served) -> None:
    client = sdk.training_client(one_rank.service)
    tokens, targets = torch.tensor([10, 11, 12]), torch.tensor([11, 12, 13])

    def run(weights: list[float]) -> types.ForwardBackwardOutput:
        datum = sdk.sdk_datum(tokens, {"target_tokens": targets, "weights": torch.tensor(weights)})
        return client.forward([datum], "cross_entropy").result(timeout=sdk.WAIT_S)

    (lp,) = sdk.logprobs(run([1.0, 1.0, 1.0]))
    assert run([0.0, 1.0, 0.0]).metrics["loss:sum"] == pytest.approx(-float(lp[1]), abs=1e-6)
    assert run([1.0, 1.0, 1.0]).metrics["loss:sum"] == pytest.approx(-float(lp.sum()), abs=1e-5)
    assert run([-2.0, 1 / 64, 0.0]).metrics["loss:sum"] == pytest.approx(
        2 * float(lp[0]) - float(lp[1]) / 64, abs=1e-5
    )
    silent = run([0.0, 0.0, 0.0])
    assert silent.metrics["loss:sum"] == 0.0
    assert torch.equal(sdk.logprobs(silent)[0], lp)


def test_several_targets_a_position_are_weighted_and_summed(one_rank: Served) -> None:
    client = sdk.training_client(one_rank.service)
    tokens, inputs = datums((6,))
    targets_N_K = torch.stack([inputs[0].tensors["target_tokens"], torch.arange(6)], dim=1)
    weights_N_K = torch.tensor([[0.75, 0.25]] * 6)
    wide = sdk.sdk_datum(tokens[0], {"target_tokens": targets_N_K, "weights": weights_N_K})
    result = client.forward([wide], "cross_entropy").result(timeout=sdk.WAIT_S)
    columns = []
    for k in range(2):
        narrow = sdk.sdk_datum(
            tokens[0], {"target_tokens": targets_N_K[:, k].contiguous(), "weights": torch.ones(6)}
        )
        columns.append(sdk.logprobs(client.forward([narrow], "cross_entropy").result(timeout=sdk.WAIT_S))[0])
    wanted = torch.stack(columns, dim=1)
    assert sdk.logprobs(result)[0].shape == (6, 2)
    assert torch.allclose(sdk.logprobs(result)[0], wanted, atol=1e-6)
    assert result.metrics["loss:sum"] == pytest.approx(float(-(wanted * weights_N_K).sum()), abs=1e-5)


def test_custom_loss_runs_over_forward_and_forward_backward(one_rank: Served) -> None:
    """The SDK's own mechanism: C = Σ lp² has dC/dlp = 2·lp, sent back as weights −2·lp."""
    client = sdk.training_client(one_rank.service)
    warmed(client)
    data = batch()

    def square(_: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return torch.stack([(lp**2).sum() for lp in logprobs]).sum(), {}

    lps = sdk.logprobs(client.forward(data, "cross_entropy").result(timeout=sdk.WAIT_S))
    result = client.forward_backward_custom(data, square).result(timeout=sdk.WAIT_S)
    assert result.metrics["loss:sum"] == pytest.approx(sum(float((lp**2).sum()) for lp in lps), rel=1e-5)
    client.optim_step(ADAM).result(timeout=sdk.WAIT_S)
    custom = dumps.vector(dumps.read(one_rank.dumps, sdk.model_id(client), 1)["gradient"])

    other = sdk.training_client(one_rank.service)
    warmed(other)
    tokens, inputs = datums(LENGTHS, seed=5)
    surrogate = [
        sdk.sdk_datum(t, {"target_tokens": i.tensors["target_tokens"], "weights": -2 * lp})
        for t, i, lp in zip(tokens, inputs, lps, strict=True)
    ]
    other.forward_backward(surrogate, "cross_entropy")
    other.optim_step(ADAM).result(timeout=sdk.WAIT_S)
    direct = dumps.vector(dumps.read(one_rank.dumps, sdk.model_id(other), 1)["gradient"])
    assert dumps.relative_l2(custom, direct) <= 1e-6


def _bad_requests() -> dict[str, tuple[list[types.Datum], str, dict[str, float], tuple[str, ...]]]:
    """Per mistake: data, loss, config, and words its error must hold."""
    tokens, target = torch.tensor([1, 2, 3]), torch.tensor([2, 3, 4])
    q, a = torch.zeros(3), torch.ones(3)

    def datum(**inputs: torch.Tensor) -> list[types.Datum]:
        return [sdk.sdk_datum(tokens, inputs)]

    return {
        "missing advantages": (
            datum(target_tokens=target, logprobs=q),
            "importance_sampling",
            {},
            ("data[0].loss_fn_inputs.advantages", "missing"),
        ),
        "short advantages": (
            datum(target_tokens=target, logprobs=q, advantages=torch.ones(2)),
            "importance_sampling",
            {},
            ("data[0].loss_fn_inputs.advantages", "2", "3"),
        ),
        "targets longer than the input": (
            datum(target_tokens=torch.tensor([2, 3, 4, 5])),
            "cross_entropy",
            {},
            ("data[0].loss_fn_inputs.target_tokens", "4", "3"),
        ),
        "token id beyond the vocabulary": (
            [sdk.sdk_datum(torch.tensor([1, 320, 3]), {"target_tokens": target})],
            "cross_entropy",
            {},
            ("data[0].model_input", "320", "319"),
        ),
        "target id beyond the vocabulary": (
            datum(target_tokens=torch.tensor([2, 3, 4000])),
            "cross_entropy",
            {},
            ("data[0].loss_fn_inputs.target_tokens", "4000", "319"),
        ),
        "unknown config key": (
            datum(target_tokens=target, logprobs=q, advantages=a),
            "ppo",
            {"clip": 0.2},
            ("clip", "clip_low_threshold"),
        ),
        "unknown input": (
            datum(target_tokens=target, weights=a, mask=a),
            "cross_entropy",
            {},
            ("data[0].loss_fn_inputs.mask",),
        ),
        "input over the context": (
            [sdk.sdk_datum(torch.ones(2049, dtype=torch.int64), {"target_tokens": torch.ones(2049).long()})],
            "cross_entropy",
            {},
            ("data[0].model_input", "2049", "2048"),
        ),
        "advantage that is no number": (
            datum(target_tokens=target, logprobs=q, advantages=torch.tensor([1.0, math.nan, 1.0])),
            "importance_sampling",
            {},
            ("data[0].loss_fn_inputs.advantages", "nan", "position 1"),
        ),
    }


TRIES = 3
"""The machine that runs this may be busy with other things; one quick answer to each mistake is enough to show it."""


def test_a_users_mistakes_fail_alone_at_once_and_name_the_field(one_rank: Served) -> None:
    disturbed, clean = sdk.training_client(one_rank.service), sdk.training_client(one_rank.service)
    warmed(disturbed)
    warmed(clean)
    mistakes = _bad_requests()
    for what, (data, loss, config, words) in mistakes.items():
        for _ in range(TRIES):
            started = time.monotonic()
            with pytest.raises(tinker.RequestFailedError) as caught:
                disturbed.forward_backward(data, loss, config or None).result(timeout=sdk.WAIT_S)
            if (answered_s := time.monotonic() - started) < 2:
                break
        assert answered_s < 2, what
        assert caught.value.category == types.RequestErrorCategory.User, what
        for word in words:
            assert word in str(caught.value), (what, word)
        assert "Traceback" not in str(caught.value), what
    steps = []
    for client in (disturbed, clean):
        client.forward_backward(batch(seed=6), "cross_entropy").result(timeout=sdk.WAIT_S)
        client.optim_step(ADAM).result(timeout=sdk.WAIT_S)
        steps.append(dumps.read(one_rank.dumps, sdk.model_id(client), 1)["gradient"])
    for name, gradient in steps[0].items():
        assert torch.equal(gradient, steps[1][name]), name


def test_what_the_sdk_cannot_send_is_refused_by_name_too(one_rank: Served) -> None:
    model = sdk.model_id(sdk.training_client(one_rank.service))
    error = _by_hand(one_rank, model, seq_id=1, loss="no_such_loss", datums=1)
    assert "no_such_loss" in error
    assert "cross_entropy" in error
    assert "data" in _by_hand(one_rank, model, seq_id=2, loss="cross_entropy", datums=0)


def _by_hand(served: Served, model: str, *, seq_id: int, loss: str, datums: int) -> str:
    """POST a forward_backward and return the error of its future."""
    request = tinker_public_pb2.ForwardBackwardRequest(model_id=model, seq_id=seq_id, loss_fn=loss)
    for _ in range(datums):
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = (
            torch.tensor([1, 2], dtype=torch.int32).numpy().tobytes()
        )
        target = datum.loss_fn_inputs["target_tokens"]
        target.dense = torch.tensor([2, 3]).numpy().tobytes()
        target.dtype = tinker_public_pb2.DTYPE_INT64
        target.shape.append(2)
    status, answer = post(served, "forward_backward", request.SerializeToString(), "application/x-protobuf")
    assert status == 200
    status, answer = post_json(served, "retrieve_future", {"request_id": answer["request_id"]})
    assert status == 200
    assert answer["category"] == "user"
    error: str = answer["error"]
    return error


def test_a_body_up_to_the_servers_own_limit_gets_through_the_proxy(one_rank: Served) -> None:
    model = sdk.model_id(sdk.training_client(one_rank.service))
    request = tinker_public_pb2.ForwardBackwardRequest(model_id=model, seq_id=1, loss_fn="cross_entropy")
    request.data.add().model_input.add().encoded_text.tokens = bytes(20 * 2**20)
    status, answer = post(one_rank, "forward_backward", request.SerializeToString(), "application/x-protobuf")
    assert status == 200, answer
    _, answer = post_json(one_rank, "retrieve_future", {"request_id": answer["request_id"]})
    assert "data[0]" in str(answer["error"])
    status, answer = post(one_rank, "forward_backward", bytes(2**26 + 1), "application/x-protobuf")
    assert status == 413, answer
    assert str(2**26) in str(answer)


def post(served: Served, path: str, body: bytes, content_type: str) -> tuple[int, dict[str, object]]:
    request = urllib.request.Request(
        f"{served.service.http}/api/v1/{path}",
        body,
        {"content-type": content_type, "x-api-key": served.service.api_key},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def post_json(served: Served, path: str, body: dict[str, object]) -> tuple[int, dict[str, object]]:
    return post(served, path, json.dumps(body).encode(), "application/json")


async def test_the_same_request_twice_at_once_runs_once(one_rank: Served) -> None:
    client = await asyncio.to_thread(sdk.training_client, one_rank.service)
    await asyncio.to_thread(warmed, client)
    model = await asyncio.to_thread(sdk.model_id, client)
    request = tinker_public_pb2.ForwardBackwardRequest(model_id=model, seq_id=3, loss_fn="cross_entropy")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = torch.tensor([1, 2, 5], dtype=torch.int32).numpy().tobytes()
    target = datum.loss_fn_inputs["target_tokens"]
    target.dense, target.dtype = torch.tensor([2, 5, 9]).numpy().tobytes(), tinker_public_pb2.DTYPE_INT64
    body = request.SerializeToString()
    answers = await asyncio.gather(
        *(
            asyncio.to_thread(post, one_rank, "forward_backward", body, "application/x-protobuf")
            for _ in range(4)
        )
    )
    assert {status for status, _ in answers} == {200}
    assert len({answer["request_id"] for _, answer in answers}) == 1
    step = {"model_id": model, "seq_id": 4, "type": "optim_step", "adam_params": {"learning_rate": 0.0}}
    steps = await asyncio.gather(
        *(asyncio.to_thread(post_json, one_rank, "optim_step", step) for _ in range(3))
    )
    assert len({answer["request_id"] for _, answer in steps}) == 1
    _, result = await asyncio.to_thread(
        post_json, one_rank, "retrieve_future", {"request_id": steps[0][1]["request_id"]}
    )
    assert result["metrics"]["window_calls"] == 1  # type: ignore[index]
    assert result["metrics"]["step"] == 2  # type: ignore[index]
    # Another body under a number that is taken is refused, and changes nothing.
    request.data.add().CopyFrom(datum)
    status, answer = await asyncio.to_thread(
        post, one_rank, "forward_backward", request.SerializeToString(), "application/x-protobuf"
    )
    assert status == 400
    assert "seq_id 3" in str(answer)


def test_chunks_that_arrive_out_of_order_run_in_order(default_packing: Served) -> None:
    """The SDK posts chunk 1 last; outputs are in datum order all the same, and the gradient is that of one call."""
    client = sdk.training_client(default_packing.service)
    warmed(client)
    lengths = (7, 3, 11, 2, 5)
    whole = client.forward(batch(lengths=lengths), "cross_entropy").result(timeout=sdk.WAIT_S)
    alone = [
        sdk.logprobs(client.forward([datum], "cross_entropy").result(timeout=sdk.WAIT_S))[0]
        for datum in batch(lengths=lengths)
    ]
    assert [len(lp) for lp in sdk.logprobs(whole)] == list(lengths)
    for together, by_itself in zip(sdk.logprobs(whole), alone, strict=True):
        assert torch.allclose(together, by_itself, atol=1e-6)
    client.forward_backward(batch(lengths=lengths), "cross_entropy")
    step = client.optim_step(ADAM).result(timeout=sdk.WAIT_S)
    assert step.metrics["window_calls"] == 3
    assert step.metrics["window_tokens"] == sum(lengths)
