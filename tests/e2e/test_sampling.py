"""Sampling through the official SDK against a real service, beside training."""

from __future__ import annotations

import json
import pickle
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
import tinker
import torch
from tinker import types

from tests.e2e.conftest import Served
from tests.support import sdk

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TEXT = list(b"to be, or not to be, that is the question")
PROMPT = types.ModelInput.from_ints(TEXT)
NEAR = 1e-5


@pytest.fixture(scope="module")
def service(one_rank: Served) -> Iterator[tinker.ServiceClient]:
    client = sdk.service_client(one_rank.service)
    yield client
    client.close("success").result(timeout=sdk.WAIT_S)


@pytest.fixture(scope="module")
def base(service: tinker.ServiceClient) -> tinker.SamplingClient:
    return service.create_sampling_client(base_model="tiny")


def sample(client: tinker.SamplingClient, **options):
    """Of 16 tokens that no EOS ends, unless `options` say so."""
    count = options.pop("num_samples", 1)
    asked = {name: options.pop(name) for name in list(options) if name.startswith(("include_", "topk_"))}
    params = types.SamplingParams(**{"max_tokens": 16, "stop": [], **options})
    return client.sample(PROMPT, count, params, **asked).result(timeout=sdk.WAIT_S)


def scored(client: tinker.TrainingClient, tokens: list[int]) -> torch.Tensor:
    """`forward` of the training path: the logprobs of all tokens but the first."""
    targets = torch.tensor(tokens[1:])
    datum = sdk.sdk_datum(
        torch.tensor(tokens[:-1]), {"target_tokens": targets, "weights": torch.ones(len(targets))}
    )
    (found,) = sdk.logprobs(client.forward([datum], "cross_entropy").result(timeout=sdk.WAIT_S))
    return found


def trained(one_rank: Served) -> tinker.TrainingClient:
    """A model whose weights are no longer the base model's."""
    client = sdk.training_client(one_rank.service)
    targets = torch.tensor(TEXT[1:])
    datum = sdk.sdk_datum(
        torch.tensor(TEXT[:-1]), {"target_tokens": targets, "weights": torch.ones(len(targets))}
    )
    for _ in range(2):
        client.forward_backward([datum], "cross_entropy")
        step = client.optim_step(types.AdamParams(learning_rate=5e-3))
    step.result(timeout=sdk.WAIT_S)
    return client


def test_sampled_logprobs_and_compute_logprobs_are_those_of_forward(one_rank: Served, base) -> None:
    model = sdk.training_client(one_rank.service)
    sequence = sample(base).sequences[0]
    everything = TEXT + list(sequence.tokens)
    wanted = scored(model, everything)
    found = base.compute_logprobs(types.ModelInput.from_ints(everything)).result(timeout=sdk.WAIT_S)
    assert found[0] is None
    torch.testing.assert_close(torch.tensor(found[1:]), wanted, atol=NEAR, rtol=NEAR)
    torch.testing.assert_close(
        torch.tensor(list(sequence.logprobs)), wanted[len(TEXT) - 1 :], atol=NEAR, rtol=NEAR
    )


def test_a_seed_repeats_and_its_samples_differ(base) -> None:
    first, again = sample(base, seed=5, num_samples=3), sample(base, seed=5, num_samples=3)
    found = [[list(s.tokens) for s in response.sequences] for response in (first, again)]
    assert found[0] == found[1]
    assert len(set(map(tuple, found[0]))) == 3
    assert [list(s.logprobs) for s in first.sequences] == [list(s.logprobs) for s in again.sequences]
    assert len({s.sequence_id for s in first.sequences}) == 3


def test_what_was_saved_is_what_is_served(one_rank: Served, service) -> None:
    """Also after the model has gone on, and has been saved again."""
    model = trained(one_rank)
    before = scored(model, TEXT)
    path = model.save_weights_for_sampler("one").result(timeout=sdk.WAIT_S).path
    unnamed = model.save_weights_and_get_sampling_client()
    datum = sdk.sdk_datum(torch.tensor(TEXT[:-1]), {"target_tokens": torch.tensor(TEXT[1:])})
    datum.loss_fn_inputs["weights"] = types.TensorData.from_torch(torch.ones(len(TEXT) - 1))
    model.forward_backward([datum], "cross_entropy")
    model.optim_step(types.AdamParams(learning_rate=5e-3)).result(timeout=sdk.WAIT_S)
    later = model.save_weights_for_sampler("two").result(timeout=sdk.WAIT_S).path
    after = scored(model, TEXT)
    assert (before - after).abs().max() > 0.01
    for client, wanted in (
        (service.create_sampling_client(model_path=path), before),
        (unnamed, before),
        (service.create_sampling_client(model_path=later), after),
    ):
        found = client.compute_logprobs(PROMPT).result(timeout=sdk.WAIT_S)
        torch.testing.assert_close(torch.tensor(found[1:]), wanted, atol=NEAR, rtol=NEAR)


def test_a_pickled_client_samples_from_the_same_weights(base) -> None:
    clone = pickle.loads(pickle.dumps(base))
    assert clone.compute_logprobs(PROMPT).result(timeout=sdk.WAIT_S) == (
        base.compute_logprobs(PROMPT).result(timeout=sdk.WAIT_S)
    )


def test_samplers_work_at_once_and_not_behind_training(one_rank: Served, service, base) -> None:
    model = trained(one_rank)
    other = service.create_sampling_client(base_model="tiny")
    targets = torch.arange(500) % 256
    datum = sdk.sdk_datum(targets, {"target_tokens": targets, "weights": torch.ones(500)})
    training = [model.forward_backward([datum] * 4, "cross_entropy") for _ in range(30)]
    params = types.SamplingParams(max_tokens=16, stop=[])
    futures = [client.sample(PROMPT, 1, params) for client in (base, other) for _ in range(4)]
    for future in futures:
        assert len(future.result(timeout=sdk.WAIT_S).sequences[0].tokens) == 16
    assert not training[-1].future().done()
    model.optim_step(types.AdamParams(learning_rate=0.0)).result(timeout=sdk.WAIT_S)


def test_a_cancelled_sample_leaves_the_sampler(one_rank: Served, base) -> None:
    """The service tells the SDK that it may cancel."""
    running = "tinkerbus_sampler_running_sequences"
    params = types.SamplingParams(max_tokens=1900, stop=[])
    future = base.sample(PROMPT, 8, params)
    deadline = time.monotonic() + 30
    while one_rank.service.metric(running) != 8:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    future.future().cancel()
    deadline = time.monotonic() + 30
    while one_rank.service.metric(running):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_unknown_weights_are_an_error_and_never_the_base_model(service) -> None:
    with pytest.raises(tinker.NotFoundError, match="sampler_weights/nowhere' is not known"):
        service.create_sampling_client(model_path="tinker://run:train:0/sampler_weights/nowhere").result()


def test_a_stranger_sees_no_sampler(one_rank: Served) -> None:
    request = urllib.request.Request(
        f"{one_rank.service.http}/api/v1/asample",
        data=json.dumps({"sampling_session_id": "s-0:sample:0", "seq_id": 0}).encode(),
        headers={"x-api-key": one_rank.service.api_key, "content-type": "application/json"},
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    assert refused.value.code == 404
