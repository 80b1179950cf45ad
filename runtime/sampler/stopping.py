"""When a sequence ends. What ends it stays in it: the token, or all tokens up to the one that completes the text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

Decode = Callable[[Sequence[int]], str]
"""Token ids as text, special tokens included."""

SLACK = 8
"""Tokens at the start of a window that may be halves of a character."""


def stops(
    tokens: Sequence[int], stop_tokens: Collection[int], stop_texts: Sequence[str], decode: Decode
) -> bool:
    """Whether the newest of the generated `tokens` is a stop token or completes a stop text."""
    if not tokens:
        return False
    if tokens[-1] in stop_tokens:
        return True
    if not stop_texts:
        return False
    wanted = max(map(len, stop_texts))
    # A text ends in the newest token, so it is enough to look at an end of the sequence that is long enough.
    size = wanted + SLACK
    while True:
        text = decode(tokens[-size:])
        if size >= len(tokens) or len(text) >= wanted + SLACK:
            return any(stop in text for stop in stop_texts)
        size *= 2
