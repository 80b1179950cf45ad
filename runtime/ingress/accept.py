"""The one way a request gets onto the log.

Answered as soon as the broker has stored it, in whatever order requests come: a lower `seq_id` is never waited for.
The same request again gets the same request id; another body under a number that is taken is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from fastapi import HTTPException, Response

from bus.errors import CodecError
from bus.events import Op
from bus.log import BodyConflict, LogEntry
from bus.tables import ModelRow
from runtime import entries
from runtime.ingress.answers import future
from runtime.ingress.body import number_field, text_field
from runtime.ingress.deps import Deps, owned_model
from runtime.ingress.off_loop import INLINE_BYTES

PUBLISHED = "tinkerbus_bus_published_messages_total"


async def accept(deps: Deps, row: ModelRow, entry: LogEntry) -> Response:
    """Append to the model's log, and answer with the future. 400 where the number holds another body.

    400, too, where the model is only the run of a copied checkpoint. Raises QueueFull.
    """
    if row.copy:
        raise HTTPException(
            400, f"model_id {entry.model_id!r} is the run of a copy: load the copy into a model of its own"
        )
    try:
        async with deps.large if entry.size > INLINE_BYTES else contextlib.nullcontext():
            appended = await deps.admission.append(deps.log, entry, trimmed_below=row.trimmed_below)
    except BodyConflict:
        raise HTTPException(
            400,
            f"another body was already accepted for seq_id {entry.seq_id} of model_id {entry.model_id!r}: "
            "its result stands",
        ) from None
    if deps.recorder is not None and not appended.duplicate:
        deps.recorder.inc(PUBLISHED, stream="ops")
    return future(entry.request_id, entry.model_id)


async def accept_json(
    deps: Deps,
    tenant: str,
    verb: str,
    sent: bytes,
    fields: dict[str, Any],
    read: Callable[[dict[str, Any]], Op],
) -> Response:
    """A numbered JSON request. What `read` refuses with CodecError goes on as a refused `verb`, and fails as a future.

    400 where `model_id` or `seq_id` cannot be read, 404 where the model is not the tenant's.
    """
    model_id = text_field(fields, "model_id")
    seq_id = number_field(fields, "seq_id", 1)
    row = await owned_model(deps, tenant, model_id)
    try:
        entry = entries.of_op(tenant, model_id, seq_id, read(fields))
    except CodecError as error:
        entry = entries.of_refusal(tenant, model_id, seq_id, str(error), error.field, sent, verb=verb)
    return await accept(deps, row, entry)
