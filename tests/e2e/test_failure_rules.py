"""What a failure costs, as the SDK's user sees it: its own call, the step that could not know of it, and nothing else.

A step that was on the log when the failure became known fails, names the lost call and ends its window; one that was
sent afterwards works on what is there. Where it matters what is on the log, the rank is stopped while the calls are
sent. Expected values are those of a model of the same seed that was never sent what failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import tinker
import torch
from tinker import types

from bus.broker_config import SERVER_USER
from bus.connection import Credentials, connect
from bus.events import AdamParams, Op, OptimStep
from bus.log import OpsLog
from runtime.pipeline import DEPTH
from tests.e2e.conftest import Served, served
from tests.support import by_hand, dumps, mutants, sdk
from tests.support.requests import datums

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

ADAM = types.AdamParams(learning_rate=1e-3)
GAP_TIMEOUT_S = 5.0
CHUNK = 3
"""Datums of one request; the SDK splits longer calls."""
FAILING = 13
"""Tokens of a datum whose loss fails on the ranks, see `tests.support.mutants`."""


@dataclass(frozen=True)
class Strict:
    at: Served
    mutant: Path

    @contextlib.contextmanager
    def failing_loss(self) -> Iterator[None]:
        self.mutant.write_text("loss that fails at 13 tokens")
        try:
            yield
        finally:
            self.mutant.unlink()


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Strict]:
    """One datum a microbatch, requests of few datums and few bytes, and little patience with missing numbers."""
    folder = tmp_path_factory.mktemp("strict")
    file = folder / "mutant"
    for at in served(
        folder,
        environment={**mutants.environment(file), "TINKERBUS_GAP_TIMEOUT_S": str(GAP_TIMEOUT_S)},
        packing={"max_datums_per_microbatch": 1},
        client={"fwdbwd_max_chunk_len": CHUNK},
        http={"max_body_bytes": 64 * 1024},
        recovery={"heartbeat_timeout_s": 60},
    ):
        yield Strict(at, file)


def batch(seed: int, lengths: tuple[int, ...] = (5, 3)) -> list[types.Datum]:
    tokens, inputs = datums(lengths, seed=seed)
    return [sdk.sdk_datum(t, i.tensors) for t, i in zip(tokens, inputs, strict=True)]


PROBE = batch(77, (6, 4))


def warmed(at: Served) -> tuple[tinker.TrainingClient, str]:
    """A model after one step, of numbers 1 and 2, and its id."""
    client = sdk.training_client(at.service)
    client.forward_backward(batch(1), "cross_entropy")
    client.optim_step(ADAM).result(timeout=sdk.WAIT_S)
    return client, sdk.model_id(client)


def same_steps(at: Served, found: str, found_step: int, wanted: str, wanted_step: int) -> None:
    """Gradient, weights before and after, and optimizer state, bit for bit."""
    one, other = dumps.read(at.dumps, found, found_step), dumps.read(at.dumps, wanted, wanted_step)
    for kind, tensors in other.items():
        assert tensors.keys() == one[kind].keys()
        for name, tensor in tensors.items():
            assert torch.equal(one[kind][name], tensor), (kind, name)


@contextlib.contextmanager
def stopped_rank(at: Served) -> Iterator[None]:
    (rank,) = [p.pid for p in at.service.tree() if "ray::Rank" in " ".join(p.cmdline())]
    os.kill(rank, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(rank, signal.SIGCONT)


def keep_waiting(client: tinker.TrainingClient) -> int:
    """So much work that, while the rank stands still, nothing sent behind it has its turn; how many numbers it took."""
    for _ in range(DEPTH):
        client.forward(batch(9, (2,)), "cross_entropy")
    return DEPTH


def wait_until_on_the_log(at: Served, model_id: str, seq_id: int) -> None:
    async def wait() -> None:
        password = (at.service.data / "nats" / "server.password").read_text().strip()
        async with await connect(at.service.nats, Credentials(SERVER_USER, password), name="test") as bus:
            log = OpsLog(bus, "main")
            async with asyncio.timeout(30):
                while not await log.numbers(model_id) >= set(range(seq_id + 1)):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)

    asyncio.run(wait())


def ask_by_hand(at: Served, model_id: str, seq_id: int, op: Op) -> by_hand.Answer:
    async def ask() -> by_hand.Answer:
        headers = {"x-api-key": at.service.api_key}
        async with httpx.AsyncClient(base_url=at.service.http, headers=headers) as client:
            return await by_hand.OverHttp(client).ask(model_id, seq_id, op)

    return asyncio.run(ask())


def _spoilt(**spoilt: torch.Tensor) -> list[types.Datum]:
    """Data of one datum, with these in place of what would be right."""
    right = {"tokens": torch.tensor([1, 2, 3]), "target_tokens": torch.tensor([2, 3, 4])}
    inputs = {**right, **spoilt}
    return [sdk.sdk_datum(inputs.pop("tokens"), inputs)]


def _picture() -> list[types.Datum]:
    chunks: list[types.ModelInputChunk] = [
        types.EncodedTextChunk(tokens=[1, 2]),
        types.ImageChunk(data=b"?", format="png", expected_tokens=1),
    ]
    targets = types.TensorData.from_torch(torch.tensor([2, 3, 4]))
    return [
        types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs={"target_tokens": targets})
    ]


Mistake = tuple[list[types.Datum], dict[str, float], str]
"""Data, configuration of the loss, and what the error says."""

MISTAKES: dict[str, Mistake] = {
    "a token beyond the vocabulary": (_spoilt(tokens=torch.tensor([1, 320, 3])), {}, "token id 320"),
    "too few weights": (_spoilt(weights=torch.ones(2)), {}, "weights.*length 2, model_input has 3"),
    "an unknown config key": (_spoilt(), {"clip": 0.2}, "clip"),
    "a picture": (_picture(), {}, "an image"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_step_behind_a_refused_chunk_of_its_window_fails_and_names_it_and_takes_nothing_along(
    strict: Strict, mistake: str
) -> None:
    at = strict.at
    (hit, model), (undisturbed, other) = warmed(at), warmed(at)
    data, config, error = MISTAKES[mistake]
    before = hit.forward(PROBE, "cross_entropy").result(timeout=sdk.WAIT_S)  # number 3
    with stopped_rank(at):
        first = 4 + keep_waiting(hit)
        good = hit.forward_backward(batch(2), "cross_entropy")
        bad = hit.forward_backward(batch(3, (4,) * CHUNK) + data, "cross_entropy", config or None)
        behind = hit.forward_backward(batch(4), "cross_entropy")
        step = hit.optim_step(ADAM)
        after = hit.forward(PROBE, "cross_entropy")
        hit.forward_backward(batch(5), "cross_entropy")
        next_step = hit.optim_step(ADAM)
        wait_until_on_the_log(at, model, first + 7)
    assert len(good.result(timeout=sdk.WAIT_S).loss_fn_outputs) == 2
    with pytest.raises(tinker.RequestFailedError, match=error) as refused:
        bad.result(timeout=sdk.WAIT_S)
    assert refused.value.category == types.RequestErrorCategory.User
    assert len(behind.result(timeout=sdk.WAIT_S).loss_fn_outputs) == 2
    lost = first + 1 if config else first + 2  # the configuration is that of every chunk
    with pytest.raises(tinker.RequestFailedError, match=f"lost forward_backward seq_id {lost},"):
        step.result(timeout=sdk.WAIT_S)
    assert sdk.equal(sdk.logprobs(after.result(timeout=sdk.WAIT_S)), sdk.logprobs(before))

    undisturbed.forward_backward(batch(5), "cross_entropy")
    wanted = undisturbed.optim_step(ADAM).result(timeout=sdk.WAIT_S).metrics
    assert next_step.result(timeout=sdk.WAIT_S).metrics == wanted
    assert wanted["window_calls"] == 1
    same_steps(at, model, 1, other, 1)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_step_sent_after_the_failure_was_seen_works_on_what_is_there(strict: Strict, mistake: str) -> None:
    at = strict.at
    (hit, model), (undisturbed, other) = warmed(at), warmed(at)
    data, config, error = MISTAKES[mistake]
    hit.forward_backward(batch(2), "cross_entropy")
    with pytest.raises(tinker.RequestFailedError, match=error):
        hit.forward_backward(data, "cross_entropy", config or None).result(timeout=sdk.WAIT_S)
    hit.forward_backward(batch(3), "cross_entropy")
    found = hit.optim_step(ADAM).result(timeout=sdk.WAIT_S).metrics

    undisturbed.forward_backward(batch(2), "cross_entropy")
    undisturbed.forward_backward(batch(3), "cross_entropy")
    assert found == undisturbed.optim_step(ADAM).result(timeout=sdk.WAIT_S).metrics
    assert found["window_calls"] == 2
    same_steps(at, model, 1, other, 1)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_refused_forward_takes_no_gradient_along_and_costs_no_step(strict: Strict, mistake: str) -> None:
    at = strict.at
    client, model = warmed(at)
    data, config, error = MISTAKES[mistake]
    with stopped_rank(at):
        first = 3 + keep_waiting(client)
        client.forward_backward(batch(2), "cross_entropy")
        scored = client.forward(data, "cross_entropy", config or None)
        step = client.optim_step(ADAM)
        wait_until_on_the_log(at, model, first + 2)
    with pytest.raises(tinker.RequestFailedError, match=error):
        scored.result(timeout=sdk.WAIT_S)
    assert step.result(timeout=sdk.WAIT_S).metrics["window_calls"] == 1


def _infinite() -> dict[str, tuple[list[types.Datum], str]]:
    """Legal requests whose gradient float32 cannot hold."""
    tokens, targets = torch.tensor([1, 2, 3]), torch.tensor([2, 3, 4])
    heavy = {"target_tokens": targets, "weights": torch.full((3,), 3e38)}
    unlikely = {
        "target_tokens": targets,
        "logprobs": torch.full((3,), -1000.0),  # a ratio of e^990
        "advantages": torch.ones(3),
    }
    return {
        "weights of 3e38": ([sdk.sdk_datum(tokens, heavy)], "cross_entropy"),
        "rollout logprobs of -1000": ([sdk.sdk_datum(tokens, unlikely)], "importance_sampling"),
    }


INFINITE = _infinite()


@pytest.mark.parametrize("cause", INFINITE)
def test_a_gradient_that_is_not_finite_costs_its_window_and_the_model_goes_on_as_if_it_never_was(
    strict: Strict, cause: str
) -> None:
    at = strict.at
    (hit, model), (undisturbed, other) = warmed(at), warmed(at)
    data, loss = INFINITE[cause]
    before = hit.forward(PROBE, "cross_entropy")
    hit.forward_backward(batch(2), "cross_entropy")
    hit.forward_backward(data, loss)
    step = hit.optim_step(ADAM)
    after = hit.forward(PROBE, "cross_entropy")
    for client in (hit, undisturbed):
        client.forward_backward(batch(3), "cross_entropy")
    steps = [client.optim_step(ADAM).result(timeout=sdk.WAIT_S).metrics for client in (hit, undisturbed)]

    vetoed = step.result(timeout=sdk.WAIT_S).metrics
    assert vetoed["skipped"] == 1
    assert vetoed["window_calls"] == 2
    assert not math.isfinite(vetoed["grad_norm"])
    assert sdk.equal(
        sdk.logprobs(after.result(timeout=sdk.WAIT_S)), sdk.logprobs(before.result(timeout=sdk.WAIT_S))
    )
    assert [(m["skipped"], m["window_calls"]) for m in steps] == [(0, 1)] * 2
    assert steps[0]["grad_norm"] == steps[1]["grad_norm"]
    same_steps(at, model, 2, other, 1)


def test_a_number_that_never_comes_fails_what_waits_for_it_and_no_other_model_waits(strict: Strict) -> None:
    """The SDK itself loses one: its server does not read a body that is too large."""
    at = strict.at
    (hit, model), (undisturbed, other) = warmed(at), warmed(at)
    hit.forward_backward(batch(2), "cross_entropy").result(timeout=sdk.WAIT_S)
    with pytest.raises(tinker.APIStatusError) as too_large:
        hit.forward_backward(batch(3, (2000,) * CHUNK), "cross_entropy").result(timeout=sdk.WAIT_S)
    assert too_large.value.status_code == 413
    behind, step = hit.forward_backward(batch(4), "cross_entropy"), hit.optim_step(ADAM)
    sent = time.monotonic()
    undisturbed.forward_backward(batch(5), "cross_entropy")
    wanted = undisturbed.optim_step(ADAM).result(timeout=sdk.WAIT_S).metrics
    assert not behind.future().done()
    for waiting in (behind, step):
        with pytest.raises(tinker.RequestFailedError, match="seq_id 4 never came") as lost:
            waiting.result(timeout=sdk.WAIT_S)
        assert lost.value.category == types.RequestErrorCategory.User
    assert time.monotonic() - sent > 0.9 * GAP_TIMEOUT_S
    # That step could not know of the missing number: its window ended with it, the calls before the gap too.
    hit.forward_backward(batch(5), "cross_entropy")
    assert hit.optim_step(ADAM).result(timeout=sdk.WAIT_S).metrics == wanted
    assert wanted["window_calls"] == 1
    same_steps(at, model, 1, other, 1)
    with pytest.raises(by_hand.Refused, match="seq_id 4"):
        ask_by_hand(at, model, 4, by_hand.batch((3,), seed=3))


def test_a_step_behind_a_call_that_failed_on_the_ranks_after_some_microbatches_fails_and_names_it(
    strict: Strict,
) -> None:
    at = strict.at
    (hit, model), (undisturbed, other) = warmed(at), warmed(at)
    with strict.failing_loss():
        with stopped_rank(at):
            first = 3 + keep_waiting(hit)
            hit.forward_backward(batch(2), "cross_entropy")
            failing = hit.forward_backward(batch(3, (5, 7, FAILING)), "cross_entropy")
            behind = hit.forward_backward(batch(4), "cross_entropy")
            step = hit.optim_step(ADAM)
            hit.forward_backward(batch(5), "cross_entropy")
            next_step = hit.optim_step(ADAM)
            wait_until_on_the_log(at, model, first + 5)
        with pytest.raises(tinker.RequestFailedError, match="13 tokens") as failed:
            failing.result(timeout=sdk.WAIT_S)
        assert failed.value.category == types.RequestErrorCategory.Server
        assert len(behind.result(timeout=sdk.WAIT_S).loss_fn_outputs) == 2
        with pytest.raises(tinker.RequestFailedError, match=f"lost forward_backward seq_id {first + 1},"):
            step.result(timeout=sdk.WAIT_S)
    undisturbed.forward_backward(batch(5), "cross_entropy")
    wanted = undisturbed.optim_step(ADAM).result(timeout=sdk.WAIT_S).metrics
    assert next_step.result(timeout=sdk.WAIT_S).metrics == wanted
    same_steps(at, model, 1, other, 1)


def test_a_call_that_failed_on_the_ranks_after_some_microbatches_leaves_the_window_as_it_was(
    strict: Strict,
) -> None:
    at = strict.at
    (hit, model), (undisturbed, other) = warmed(at), warmed(at)
    hit.forward_backward(batch(2), "cross_entropy")
    with strict.failing_loss(), pytest.raises(tinker.RequestFailedError, match="13 tokens"):
        hit.forward_backward(batch(3, (5, 7, FAILING)), "cross_entropy").result(timeout=sdk.WAIT_S)
    found = hit.optim_step(ADAM).result(timeout=sdk.WAIT_S).metrics
    undisturbed.forward_backward(batch(2), "cross_entropy")
    assert found == undisturbed.optim_step(ADAM).result(timeout=sdk.WAIT_S).metrics
    same_steps(at, model, 1, other, 1)


def test_a_refused_request_uses_up_its_number(strict: Strict) -> None:
    at = strict.at
    client, model = warmed(at)
    with pytest.raises(tinker.RequestFailedError, match="token id 320"):
        client.forward_backward(MISTAKES["a token beyond the vocabulary"][0], "cross_entropy").result(
            timeout=sdk.WAIT_S
        )  # number 3
    client.forward_backward(batch(2), "cross_entropy").result(timeout=sdk.WAIT_S)
    with pytest.raises(tinker.RequestFailedError, match=r"adam_params\.learning_rate is -1"):
        client.optim_step(types.AdamParams(learning_rate=-1.0)).result(timeout=sdk.WAIT_S)  # number 5
    right = {3: by_hand.batch((3,), seed=3), 5: OptimStep(adam_params=AdamParams(learning_rate=1e-3))}
    for seq_id, op in right.items():
        with pytest.raises(by_hand.Refused, match=f"another body was already accepted for seq_id {seq_id} "):
            ask_by_hand(at, model, seq_id, op)
    # What follows has its turn at once, in the window as it was.
    metrics = client.optim_step(ADAM).result(timeout=sdk.WAIT_S).metrics
    assert (metrics["step"], metrics["window_calls"]) == (2, 1)
