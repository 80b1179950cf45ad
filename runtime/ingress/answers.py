"""Responses in the forms the SDK reads.

A refusal is always JSON with a `detail`: the SDK takes a 400 without a body for a proxy's and sends it again.
"""

from __future__ import annotations

import json
import math
from typing import Any

from fastapi import Response

from bus.codec import PROTOBUF

RETRY_AFTER_S = 2
"""What a client waits when too much waits, or the broker is full or away; the SDK obeys up to 60 s."""


def answer(content: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON. Raises ValueError for a number that JSON has no word for: see `number`."""
    body = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    return Response(body, status, headers, media_type="application/json")


def number(value: float) -> float | str:
    """A metric in JSON. NaN and infinities become texts, as in protobuf's JSON; the SDK reads those as floats."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def future(request_id: str, model_id: str) -> Response:
    """The request is on the log; its result comes from `retrieve_future`."""
    return answer({"request_id": request_id, "model_id": model_id})


def protobuf(body: bytes) -> Response:
    return Response(body, media_type=PROTOBUF)


def refusal(status: int, detail: str, headers: dict[str, str] | None = None) -> Response:
    return answer({"detail": detail}, status, headers)


def full(detail: str) -> Response:
    """429: too much waits for its result. Nothing was accepted, and the same request may be sent again."""
    content = {"detail": detail, "queue_state": "paused_capacity", "queue_state_reason": detail}
    return answer(content, 429, {"retry-after": str(RETRY_AFTER_S)})


def later(detail: str) -> Response:
    """429: nothing was accepted, the same request may be sent again."""
    return refusal(429, detail, {"retry-after": str(RETRY_AFTER_S)})
