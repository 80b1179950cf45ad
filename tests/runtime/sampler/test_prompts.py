"""What is said of the prompt's own tokens, against one plain pass of transformers at temperature 1."""

from __future__ import annotations

import math

import pytest
import torch

from runtime.sampler import prompt as prompts
from runtime.sampler.contract import EMPTY_LOGPROB, Targets
from tests.runtime.sampler.conftest import PROMPT, finish, numbers, plain_logprobs, request

N = len(PROMPT)
NEAR = {"atol": 1e-5, "rtol": 1e-5}
"""Drawn tokens may be unlikely ones, whose logprobs have fewer digits behind the point."""


@pytest.fixture(params=[1, 2**24], ids=["one position at a time", "all positions at once"], autouse=True)
def slices(request, monkeypatch) -> None:
    monkeypatch.setattr(prompts, "SLICE_VALUES", request.param)


@pytest.fixture
def plain(model):
    """Row i is about prompt token i + 1."""
    return plain_logprobs(model, PROMPT)[:-1]


def test_each_token_has_its_logprob_and_the_first_has_none(engine, plain) -> None:
    (sampled,) = finish(engine, request(max_tokens=1, temperature=0.3, prompt_logprobs=True))
    found = numbers(sampled.prompt_logprobs)
    assert math.isnan(found[0])
    torch.testing.assert_close(found[1:], plain.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0], **NEAR)


def test_only_the_last_ones_where_only_they_are_asked_for(engine, plain) -> None:
    options = {"prompt_logprobs": True, "prompt_logprobs_last_n": 3, "top_prompt_logprobs": 2}
    (sampled,) = finish(engine, request(max_tokens=1, **options))
    found, top = numbers(sampled.prompt_logprobs), sampled.top_prompt_logprobs
    assert found[:-3].isnan().all()
    torch.testing.assert_close(
        found[-3:], plain[-3:].gather(1, torch.tensor(PROMPT[-3:])[:, None])[:, 0], **NEAR
    )
    assert (numbers(top.logprobs)[:-3] == EMPTY_LOGPROB).all()
    assert (numbers(top.logprobs)[-3:] > EMPTY_LOGPROB).all()


def test_the_likeliest_tokens_and_an_empty_first_row(engine, plain) -> None:
    (sampled,) = finish(engine, request(max_tokens=1, top_prompt_logprobs=4))
    ids, logprobs = (
        numbers(sampled.top_prompt_logprobs.token_ids),
        numbers(sampled.top_prompt_logprobs.logprobs),
    )
    assert ids[0].tolist() == [0] * 4
    assert (logprobs[0] == EMPTY_LOGPROB).all()
    wanted = plain.topk(4)
    assert torch.equal(ids[1:].long(), wanted.indices)
    torch.testing.assert_close(logprobs[1:], wanted.values, **NEAR)
    assert sampled.prompt_logprobs is None


def test_targets_are_scored_where_they_stand_and_minus_one_is_0(engine, plain) -> None:
    ids = torch.randint(0, 320, (N - 1, 3), generator=torch.Generator().manual_seed(0))
    ids[2, 1] = -1
    asked = Targets(ids=tuple(ids.flatten().tolist()), shape=(N - 1, 3))
    (sampled,) = finish(engine, request(max_tokens=1, targets=asked))
    found = sampled.target_prompt_logprobs
    wanted = plain.gather(1, ids.clamp(min=0))
    wanted[2, 1] = 0.0
    assert found.shape == (N - 1, 3)
    torch.testing.assert_close(numbers(found.logprobs), wanted, **NEAR)


def test_sparse_targets_are_answered_in_their_own_layout(engine, plain) -> None:
    crow = (*[0] * 5, 1, *[1] * 3, *[3] * (N - 9))
    asked = Targets(ids=(7, 8, 9), shape=(N - 1, 4), crow_indices=crow, col_indices=(3, 0, 2))
    assert len(crow) == N
    (sampled,) = finish(engine, request(max_tokens=1, targets=asked))
    found = sampled.target_prompt_logprobs
    assert (found.shape, found.crow_indices, found.col_indices) == (asked.shape, crow, (3, 0, 2))
    torch.testing.assert_close(numbers(found.logprobs), plain[[4, 8, 8], [7, 8, 9]], **NEAR)


def test_alternatives_are_drawn_at_the_requests_temperature(engine, model) -> None:
    (sampled,) = finish(engine, request(max_tokens=1, temperature=0.6, prompt_alt_tokens=5))
    alt = sampled.prompt_alt_tokens
    ids = numbers(alt.tokens).long()
    assert ids.shape == (N - 1, 5)
    wanted = plain_logprobs(model, PROMPT, 0.6)[:-1].gather(1, ids)
    torch.testing.assert_close(numbers(alt.logprobs), wanted, **NEAR)
    assert len(set(ids.flatten().tolist())) > 5


def test_a_prompt_of_one_token_has_nothing_to_say(engine) -> None:
    (sampled,) = finish(
        engine,
        request((65,), 1, prompt_logprobs=True, top_prompt_logprobs=2, prompt_alt_tokens=2),
    )
    assert numbers(sampled.prompt_logprobs).isnan().all()
    assert numbers(sampled.prompt_alt_tokens.tokens).shape == (0, 2)
