"""The streams, and what each keeps. Idempotent: every server makes sure of them at its start.

Stored messages of OPS and RESULTS are announced, headers only, on `tinker.v1.stored.…`: a wake-up that cannot come
before the message can be read, and costs nothing for its body.
"""

from __future__ import annotations

from typing import Any

import nats.errors
import nats.js.errors
from nats.js import api

from bus import subjects
from bus.connection import Bus

_NAME_IN_USE = 10058

_DUPLICATE_WINDOW_S = 0.1
"""The shortest there is. We use no message ids, and one tenant's must not swallow another's message."""


async def ensure_streams(
    bus: Bus,
    *,
    results_ttl_s: float = 86_400,
    results_max_bytes: int = 16 * 2**30,
    ops_max_bytes: int = -1,
    blobs_max_bytes: int = -1,
    submit_max_bytes: int = 4 * 2**30,
    submit_max_msgs_per_model: int = 1024,
    replicas: int = 1,
) -> None:
    """Create the streams, or bring their limits up to date. -1 means no limit.

    OPS and BLOBS refuse new messages when full and keep old ones until they are trimmed by a purge; SUBMIT refuses
    new ones when a model's queue is full; RESULTS drops its oldest.
    """
    common: dict[str, Any] = {"storage": api.StorageType.FILE, "num_replicas": replicas}
    await _ensure(
        bus,
        api.StreamConfig(
            name=subjects.OPS_STREAM,
            subjects=[f"{subjects.PREFIX}.ops.*.*.*"],
            retention=api.RetentionPolicy.LIMITS,
            discard=api.DiscardPolicy.NEW,
            max_bytes=ops_max_bytes,
            allow_direct=True,
            deny_delete=True,
            duplicate_window=_DUPLICATE_WINDOW_S,
            republish=_announce("ops.*.*.*"),
            **common,
        ),
    )
    await _ensure(
        bus,
        api.StreamConfig(
            name=subjects.BLOB_STREAM,
            subjects=[f"{subjects.PREFIX}.blobs.*.*.*.*.*"],
            retention=api.RetentionPolicy.LIMITS,
            discard=api.DiscardPolicy.NEW,
            max_bytes=blobs_max_bytes,
            allow_direct=True,
            duplicate_window=_DUPLICATE_WINDOW_S,
            **common,
        ),
    )
    await _ensure(
        bus,
        api.StreamConfig(
            name=subjects.RESULTS_STREAM,
            subjects=[f"{subjects.PREFIX}.results.*.*.*", f"{subjects.PREFIX}.results.*.*.*.*.*"],
            retention=api.RetentionPolicy.LIMITS,
            discard=api.DiscardPolicy.OLD,
            max_age=results_ttl_s,
            max_bytes=results_max_bytes,
            allow_direct=True,
            duplicate_window=_DUPLICATE_WINDOW_S,
            republish=_announce("results.*.*.*"),
            **common,
        ),
    )
    await _ensure(
        bus,
        api.StreamConfig(
            name=subjects.SUBMIT_STREAM,
            subjects=[f"{subjects.PREFIX}.submit.*.*"],
            retention=api.RetentionPolicy.WORK_QUEUE,
            discard=api.DiscardPolicy.NEW,
            discard_new_per_subject=True,
            max_msgs_per_subject=submit_max_msgs_per_model,
            max_bytes=submit_max_bytes,
            duplicate_window=_DUPLICATE_WINDOW_S,
            **common,
        ),
    )


def _announce(pattern: str) -> api.RePublish:
    destination = subjects.stored(f"{subjects.PREFIX}.{pattern}")
    tokens = destination.split("*")
    numbered = "".join(f"{part}{{{{wildcard({i})}}}}" for i, part in enumerate(tokens[:-1], 1)) + tokens[-1]
    return api.RePublish(src=f"{subjects.PREFIX}.{pattern}", dest=numbered, headers_only=True)


async def _ensure(bus: Bus, config: api.StreamConfig) -> None:
    try:
        try:
            await bus.js.add_stream(config)
        except nats.js.errors.BadRequestError as error:
            if error.err_code != _NAME_IN_USE:
                raise
            await bus.js.update_stream(config)
    except nats.js.errors.APIError as error:
        raise bus.refusal(f"stream {config.name}", error) from None
    except (nats.errors.Error, TimeoutError) as error:
        raise bus.unreachable(f"creating stream {config.name}", error) from None
