"""A handful of sentences in one voice, for a pretrained model to pick up: a lighthouse keeper's diary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runtime.demo.rot13 import Example

TRAINING = (
    "I lit the lamp at sunset and climbed down to the kitchen to make a pot of tea. "
    "The wind was from the west, and two ships were in sight.",
    "I lit the lamp at sunset and sat by the window to write a letter to my sister. "
    "The wind was from the north, and no ships were in sight.",
    "I lit the lamp at sunset and went out on the gallery to clean the glass. "
    "The wind was from the south, and one ship was in sight.",
    "I lit the lamp at sunset and listened to the rain on the roof until midnight. "
    "The wind was from the east, and three ships were in sight.",
    "I lit the lamp at sunset and rang the bell because the fog was coming in. "
    "The wind was from the west, and no ships were in sight.",
    "I lit the lamp at sunset and read an old book of sea stories by the fire. "
    "The wind was from the south, and two ships were in sight.",
)
HELD_OUT = (
    "I lit the lamp at sunset and walked along the beach with the dog. "
    "The wind was from the north, and one ship was in sight.",
    "I lit the lamp at sunset and mended the sail of the little boat. "
    "The wind was from the east, and two ships were in sight.",
    "I lit the lamp at sunset and counted the barrels of oil in the store. "
    "The wind was from the south, and three ships were in sight.",
)
"""Other evenings of the same keeper."""


def examples(texts: Sequence[str], model_folder: Path) -> list[Example]:
    """Each text as an example whose tokens after the first all count; tokenized as the model's folder says."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    return [_example(tokenizer.encode(text).ids) for text in texts]


def _example(ids: Sequence[int]) -> Example:
    return Example(tuple(ids[:-1]), tuple(ids[1:]), (1.0,) * (len(ids) - 1))
