"""A handful of sentences in one voice, for a pretrained model to pick up: a lighthouse keeper's log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runtime.demo.rot13 import Example

TRAINING = (
    "Lamp lit at dusk, oil at nine gallons. Wind north-west and rising, two sails to seaward, none in trouble.",
    "Lamp lit at dusk, oil at eight gallons. Wind west and steady, one sail to seaward, standing well off the reef.",
    "Lamp lit at dusk, oil at seven gallons. Wind south and falling, fog before midnight, bell rung until four.",
    "Lamp lit at dusk, oil at six gallons. Wind south-west and light, no sail to seaward, glass cleaned at noon.",
    "Lamp lit at dusk, oil at five gallons. Wind north and bitter, ice on the gallery, wick trimmed twice.",
    "Lamp lit at dusk, oil at four gallons. Wind east and rising, three sails to seaward, one in trouble and seen in.",
)
HELD_OUT = (
    "Lamp lit at dusk, oil at three gallons. Wind north-east and steady, two sails to seaward, fog before midnight.",
    "Lamp lit at dusk, oil at two gallons. Wind west and rising, no sail to seaward, bell rung until five.",
    "Lamp lit at dusk, oil at ten gallons. Wind south and light, ice on the gallery, glass cleaned at noon.",
)
"""Other evenings of the same keeper."""


def examples(texts: Sequence[str], model_folder: Path) -> list[Example]:
    """Each text as an example whose tokens after the first all count; tokenized as the model's folder says."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    return [_example(tokenizer.encode(text).ids) for text in texts]


def _example(ids: Sequence[int]) -> Example:
    return Example(tuple(ids[:-1]), tuple(ids[1:]), (1.0,) * (len(ids) - 1))
