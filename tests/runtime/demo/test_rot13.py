"""The task of the demo: what is asked, and what counts."""

from __future__ import annotations

from runtime.demo import rot13
from runtime.demo.rot13 import Example


def test_every_letter_is_followed_by_the_capital_thirteen_places_on() -> None:
    assert "".join(map(rot13.answer, "abcmnz")) == "NOPZAM"


def test_an_example_predicts_its_next_byte_and_counts_answers_alone() -> None:
    example = rot13.example("no a")
    assert example == Example(
        tokens=tuple(b"nAoB a"),
        targets=tuple(b"AoB aN"),
        weights=(1.0, 0.0, 1.0, 0.0, 0.0, 1.0),
    )


def test_what_is_predicted_where_answers_stand_is_shown_and_the_rest_is_not() -> None:
    predictions = [ord("A"), 0, ord("B"), 0, 0, 200]
    assert rot13.answers_in(predictions, rot13.example("no a")) == "AB·"


def test_held_out_words_are_not_trained_on_and_share_every_letter_with_those_that_are() -> None:
    trained = set("".join(rot13.TRAINING_WORDS))
    assert not set(rot13.HELD_OUT_WORDS) & set(rot13.TRAINING_WORDS)
    assert trained == set("abcdefghijklmnopqrstuvwxyz")


def test_batches_have_the_asked_size_and_are_the_same_each_time() -> None:
    batches = rot13.batches(3, 5, seed=1)
    assert [len(batch) for batch in batches] == [5, 5, 5]
    assert batches == rot13.batches(3, 5, seed=1)
    assert batches != rot13.batches(3, 5, seed=2)


def test_each_held_out_word_stands_in_one_example() -> None:
    letters = sum(len(word) for word in rot13.HELD_OUT_WORDS)
    assert sum(sum(example.weights) for example in rot13.held_out()) == letters
