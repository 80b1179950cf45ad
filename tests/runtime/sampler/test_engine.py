"""Generated tokens and their logprobs, against transformers."""

from __future__ import annotations

import pytest
import torch

from runtime.sampler.contract import SamplingRefused
from tests.runtime.sampler.conftest import (
    PROMPT,
    finish,
    numbers,
    plain_logprobs,
    plain_sampled,
    request,
    run,
    tokens,
)

OTHERS = (tuple(b"a"), tuple(b"the quick brown fox jumps over the lazy dog"), tuple(b"1 2 3"))
NEAR = {"atol": 1e-5, "rtol": 1e-5}
"""Drawn tokens may be unlikely ones, whose logprobs have fewer digits behind the point."""


def test_temperature_0_is_what_transformers_generates_greedily(engine, model) -> None:
    ids = torch.tensor([PROMPT])
    wanted = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=None
    )
    (sampled,) = finish(engine, request(max_tokens=24, temperature=0.0))
    assert tokens(sampled) == wanted[0, len(PROMPT) :].tolist()
    assert sampled.sequences[0].stop_reason == "length"


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_logprobs_are_those_of_the_scaled_distribution_in_a_full_pass(engine, model, temperature) -> None:
    (sampled,) = finish(engine, request(max_tokens=20, temperature=temperature, top_k=20, top_p=0.9))
    wanted = plain_sampled(model, PROMPT, tokens(sampled), temperature)
    torch.testing.assert_close(numbers(sampled.sequences[0].logprobs), wanted, **NEAR)


def test_at_temperature_0_they_are_those_of_temperature_1(engine, model) -> None:
    (sampled,) = finish(engine, request(temperature=0.0))
    torch.testing.assert_close(
        numbers(sampled.sequences[0].logprobs), plain_sampled(model, PROMPT, tokens(sampled)), **NEAR
    )


def test_rows_that_come_and_go_do_not_disturb_each_other(engine, model) -> None:
    """Greedy rows of unlike lengths start at unlike times, and each says what it says alone."""
    alone = {prompt: finish(engine, request(prompt, 30, temperature=0.0))[0] for prompt in (PROMPT, *OTHERS)}
    asked = {
        prompt: request(prompt, 30 - 7 * i, temperature=0.0) for i, prompt in enumerate((PROMPT, *OTHERS))
    }
    outcomes = {}
    for one in asked.values():
        engine.add(one, engine.weights(one))
        for _ in range(4):
            outcomes |= {done.request_id: done.outcome for done in engine.step()}
    outcomes |= run(engine)
    for prompt, one in asked.items():
        found = outcomes[one.request_id]
        assert tokens(found) == tokens(alone[prompt])[: one.max_tokens]
        torch.testing.assert_close(
            numbers(found.sequences[0].logprobs), plain_sampled(model, prompt, tokens(found)), **NEAR
        )


def test_more_samples_than_fit_run_one_after_the_other_from_one_prompt(engine, model) -> None:
    (sampled,) = finish(engine, request(max_tokens=5, num_samples=20))
    assert len(sampled.sequences) == 20
    for index in (0, 7, 8, 19):
        wanted = plain_sampled(model, PROMPT, tokens(sampled, index))
        torch.testing.assert_close(numbers(sampled.sequences[index].logprobs), wanted, **NEAR)


def test_samples_of_one_request_differ(engine) -> None:
    for seed in (None, 7):
        (sampled,) = finish(engine, request(num_samples=4, seed=seed))
        assert len({tuple(tokens(sampled, index)) for index in range(4)}) == 4


def test_a_seed_gives_the_same_bits_alone_and_in_company(engine) -> None:
    seeded = {"max_tokens": 20, "num_samples": 3, "seed": 11, "prompt_logprobs": True, "prompt_alt_tokens": 2}
    (alone,) = finish(engine, request(**seeded))
    company = [request(prompt, 12, num_samples=2) for prompt in OTHERS]
    *_, together = finish(engine, *company, request(**seeded))
    assert together == alone


def test_another_seed_gives_other_tokens_and_no_seed_always_others(engine) -> None:
    found = finish(engine, *(request(seed=seed, max_tokens=16) for seed in (1, 2, None, None)))
    assert len({tuple(tokens(sampled)) for sampled in found}) == 4


def test_what_is_drawn_is_distributed_as_the_model_says(engine, model) -> None:
    """First tokens of 4000 samples: the largest difference to the model's distribution is that of chance."""
    for options in ({}, {"top_k": 5}, {"top_p": 0.5}, {"temperature": 0.5}):
        (sampled,) = finish(engine, request(max_tokens=1, num_samples=4000, seed=3, **options))
        counts = torch.bincount(torch.tensor([tokens(sampled, i)[0] for i in range(4000)]), minlength=320)
        wanted = expected(plain_logprobs(model, PROMPT, options.get("temperature", 1.0))[-1].exp(), options)
        assert not counts[wanted == 0].any(), options
        assert (counts / 4000 - wanted).abs().max() < 0.03, options


def expected(probabilities, options):
    falling, order = probabilities.sort(descending=True)
    if k := options.get("top_k"):
        falling[k:] = 0
    if p := options.get("top_p"):
        falling[1:][falling.cumsum(0)[:-1] >= p] = 0
    return torch.zeros_like(probabilities).index_copy_(0, order, falling / falling.sum())


def test_the_likeliest_sampled_tokens_come_with_their_logprobs(engine, model) -> None:
    (sampled,) = finish(engine, request(max_tokens=6, temperature=0.7, top_sample_logprobs=3))
    top = sampled.sequences[0].top_logprobs
    at = plain_logprobs(model, [*PROMPT, *tokens(sampled)], 0.7)[len(PROMPT) - 1 : -1].topk(3)
    assert torch.equal(numbers(top.token_ids).long(), at.indices)
    torch.testing.assert_close(numbers(top.logprobs), at.values, **NEAR)


def test_a_cancelled_request_makes_room_and_gets_no_result(engine) -> None:
    long, short = request(max_tokens=500, num_samples=8), request(max_tokens=2)
    for one in (long, short):
        engine.add(one, engine.weights(one))
    engine.step()
    assert (engine.running, engine.waiting) == (8, 1)
    engine.cancel(long.request_id)
    assert (engine.running, engine.waiting) == (0, 1)
    assert run(engine).keys() == {short.request_id}


def test_the_last_token_of_the_context_can_be_generated_and_no_more(engine) -> None:
    (sampled,) = finish(engine, request((1,) * 2040, 8))
    assert len(tokens(sampled)) == 8
    with pytest.raises(
        SamplingRefused, match="2041 tokens and max_tokens 8 are more than the context of 2048"
    ):
        finish(engine, request((1,) * 2041, 8))


def test_a_token_that_the_model_does_not_have_is_refused(engine) -> None:
    with pytest.raises(SamplingRefused, match="token 320, but the vocabulary has 320"):
        finish(engine, request((1, 320)))
