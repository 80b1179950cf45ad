"""Where a sequence ends. The tiny model's greedy text is what is cut up."""

from __future__ import annotations

import pytest

from runtime.sampler.stopping import stops
from tests.runtime.sampler.conftest import finish, request, tokens


@pytest.fixture(scope="module")
def text(engine) -> list[int]:
    """40 greedy tokens."""
    (sampled,) = finish(engine, request(max_tokens=40, temperature=0.0))
    return tokens(sampled)


def cut(engine, **options):
    (sampled,) = finish(engine, request(max_tokens=40, temperature=0.0, **options))
    return tokens(sampled), sampled.sequences[0].stop_reason


def test_a_stop_token_ends_a_sequence_and_is_its_last(engine, text) -> None:
    stop = text[5]
    assert cut(engine, stop_tokens=(stop,)) == (text[: text.index(stop) + 1], "stop")


def test_eos_ends_a_sequence_unless_nothing_is_to(engine, text) -> None:
    """The engine's EOS is made one of the tokens that the model says."""
    eos, engine.library.eos_ids = engine.library.eos_ids, frozenset({text[7]})
    try:
        assert cut(engine, stop_at_eos=True) == (text[: text.index(text[7]) + 1], "stop")
        assert cut(engine, stop_at_eos=False) == (text, "length")
    finally:
        engine.library.eos_ids = eos


def test_the_tiny_models_eos_is_its_end_of_text(engine) -> None:
    assert engine.library.eos_ids == {256}


def test_a_stop_text_ends_a_sequence_with_the_token_that_completes_it(engine, tiny_folder, text) -> None:
    from transformers import AutoTokenizer

    decode = AutoTokenizer.from_pretrained(tiny_folder).decode
    printable = next(
        i
        for i in range(3, 39)
        if "\ufffd" not in decode(text[i : i + 2]) and len(decode(text[i : i + 2])) == 2
    )
    stop = decode(text[printable : printable + 2])
    end = next(n for n in range(1, 41) if stop in decode(text[:n]))
    assert cut(engine, stop_texts=("never said", stop)) == (text[:end], "stop")


def test_the_last_token_may_be_both_the_stop_and_the_longest(engine, text) -> None:
    (sampled,) = finish(engine, request(max_tokens=1, temperature=0.0, stop_tokens=(text[0],)))
    assert sampled.sequences[0].stop_reason == "stop"


def test_a_stop_text_is_found_behind_tokens_that_have_no_text() -> None:
    def decode(ids):
        return "".join({1: "a", 2: "b"}.get(token, "") for token in ids)

    assert stops([1, *[0] * 100, 2], (), ("ab",), decode)
    assert not stops([2, *[0] * 100, 2], (), ("ab",), decode)
