"""The text transformation that `tiny` learns: after every letter comes the capital of its ROT13.

`hot tea` is written `hUoBtG tGeRaN`. A model has to name the letter that stands thirteen places on; what it is
trained and scored on are those capitals alone. Pure; one token a byte, as in the tokenizer of `tiny`.
"""

from __future__ import annotations

import codecs
import random
from collections.abc import Sequence
from dataclasses import dataclass

_TRAINING = (
    "amber anvil banjo bread brick cargo chalk cliff cozy crisp dough dwarf equal exist fjord flint fuzzy gaze ghost "
    "glove habit hedge hinge index ivory jazz jelly joker juice kayak knife lemon lynx maple mixer moss naval nozzle "
    "oasis olive oxide pearl piano pixel prize quartz queen quick quiz radio river royal saddle sixty squid stove "
    "sugar swamp topaz tulip ultra urban valve vivid vortex waltz wharf wizard xenon yacht yeast yoga zebra zinc"
)
_HELD_OUT = (
    "apple bridge candle dolphin engine forest garden harbour island jacket kettle lantern mirror needle orange "
    "pocket question rabbit silver thunder umbrella village window xylem yellow zipper"
)

TRAINING_WORDS = tuple(_TRAINING.split())
HELD_OUT_WORDS = tuple(_HELD_OUT.split())
"""None of them is a training word."""


@dataclass(frozen=True, slots=True)
class Example:
    """`tokens[i]` predicts `targets[i]`, which counts `weights[i]`; all of one length."""

    tokens: tuple[int, ...]
    targets: tuple[int, ...]
    weights: tuple[float, ...]


def answer(letter: str) -> str:
    """What has to follow a letter.

    >>> answer("h")
    'U'
    """
    return codecs.encode(letter, "rot13").upper()


def example(words: str) -> Example:
    """Lower-case `words` as a training example.

    >>> bytes(example("hot tea").tokens + example("hot tea").targets[-1:])
    b'hUoBtG tGeRaN'
    """
    text, counts = "", []
    for letter in words:
        text += letter
        counts.append(0.0)
        if letter != " ":
            text += answer(letter)
            counts.append(1.0)
    tokens = tuple(text.encode("ascii"))
    return Example(tokens[:-1], tokens[1:], tuple(counts[1:]))


def answers_in(predictions: Sequence[int], of: Example) -> str:
    """The predicted bytes where `of` has its answers; a dot stands for what does not print."""
    found = (p for p, weight in zip(predictions, of.weights, strict=True) if weight)
    return "".join(chr(p) if 32 < p < 127 else "·" for p in found)


def batches(steps: int, examples: int, *, seed: int) -> list[list[Example]]:
    """`steps` batches of `examples` examples, three training words each."""
    draw = random.Random(seed)
    return [
        [example(" ".join(draw.sample(TRAINING_WORDS, 3))) for _ in range(examples)] for _ in range(steps)
    ]


def held_out() -> list[Example]:
    """Every held-out word once, two in an example."""
    pairs = zip(HELD_OUT_WORDS[::2], HELD_OUT_WORDS[1::2], strict=True)
    return [example(" ".join(pair)) for pair in pairs]
