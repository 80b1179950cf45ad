"""Waiting for what another party does."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any


async def until(condition: Callable[[], Any], timeout_s: float = 30.0) -> None:
    """Returns when `condition()`, awaited where it is a coroutine, is true; fails after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while True:
            answer = condition()
            if inspect.isawaitable(answer):
                answer = await answer
            if answer:
                return
            await asyncio.sleep(0.01)
