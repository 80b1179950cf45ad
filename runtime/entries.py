"""What goes onto the log, as the ingress and the intake write it.

An entry's `body_hash` identifies what the sender sent: the same request again has the same hash, another one under
the same number has not. A request that cannot be understood goes on as `Refused`, so that its number is used up.
What came as JSON stays JSON, and so is answered in JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from bus import log
from bus.codec import JSON, MSGPACK, PROTOBUF, encode, peek_forward_only
from bus.errors import CodecError
from bus.events import Op, Refused
from bus.log import LogEntry

FORWARD_BACKWARD = "forward_backward"
FORWARD = "forward"


def of_op(tenant: str, model_id: str, seq_id: int | None, op: Op, content_type: str = MSGPACK) -> LogEntry:
    """An operation, encoded here: its sender's spelling (spaces, key order, defaults left out) does not count.

    Nor does its content type: the hash is that of the msgpack form, also where the entry is JSON.
    """
    entry = log.entry(tenant, model_id, seq_id, _verb(op), encode(op), MSGPACK)
    if content_type != JSON:
        return entry
    # Tensors as base64, which is shorter than a list of numbers.
    return replace(entry, body=msgspec.json.encode(op), content_type=JSON)


def of_sdk_body(tenant: str, model_id: str, seq_id: int, body: bytes) -> LogEntry:
    """The SDK's forward_backward, verbatim. Hashes the body: about a millisecond a MB."""
    return log.entry(tenant, model_id, seq_id, FORWARD_BACKWARD, body, PROTOBUF)


def of_refusal(
    tenant: str,
    model_id: str,
    seq_id: int | None,
    error: str,
    field: str | None,
    sent: bytes,
    content_type: str = MSGPACK,
    verb: str | None = None,
) -> LogEntry:
    """A request that is refused; `sent` is the body as it came, and what its hash is of.

    `verb` is the operation it would have been: only the loss of a `forward_backward` concerns the step behind it.
    """
    op = Refused(error=error, field=field, verb=verb)
    return replace(of_op(tenant, model_id, seq_id, op, content_type), body_hash=log.body_hash(sent, MSGPACK))


def too_large(sizes: Sequence[int], limit: int) -> CodecError | None:
    """What is wrong with the first datum above `limit` bytes, 0 for no limit; `sizes` are the datums', as they came."""
    for i, size in enumerate(sizes):
        if limit and size > limit:
            error = f"data[{i}] has {size} bytes; the limit is {limit} (limits.max_datum_bytes)"
            return CodecError(error, f"data[{i}]")
    return None


def only_scores(entry: LogEntry) -> bool:
    """Whether an SDK body is a `forward`, which takes no gradient along when it fails. Parses the body, all of it."""
    return entry.content_type == PROTOBUF and peek_forward_only(entry.body)


def _verb(op: Op) -> str:
    return str(op.__struct_config__.tag)
