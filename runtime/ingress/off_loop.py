"""Work that would hold the event loop for more than a few milliseconds goes to a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

INLINE_BYTES = 256 * 1024
"""Hashing, parsing or compressing this much takes well under a millisecond."""


async def off_loop(size: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """`function(*args)`, in a thread when it works on more than INLINE_BYTES."""
    if size <= INLINE_BYTES:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)
