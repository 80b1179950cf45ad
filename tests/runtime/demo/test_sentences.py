"""Sentences for a pretrained model, tokenized as its folder says."""

from __future__ import annotations

from pathlib import Path

from actors.models import tiny
from runtime.demo import sentences


def test_every_token_after_the_first_is_predicted_and_counts(tmp_path: Path) -> None:
    tiny.tokenizer().save_pretrained(tmp_path)
    (example,) = sentences.examples(["sea"], tmp_path)
    tokenizer = tiny.tokenizer()
    s, e, a = tokenizer("sea")["input_ids"]
    assert (example.tokens, example.targets, example.weights) == ((s, e), (e, a), (1.0, 1.0))


def test_held_out_sentences_are_other_ones() -> None:
    assert not set(sentences.TRAINING) & set(sentences.HELD_OUT)
