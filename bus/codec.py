"""Bytes to structs and back: msgpack, JSON, and the SDK's own protobuf.

What a decoder returns has been checked against the schema, and every `Tensor` in it holds bytes whose length fits
its dtype and shape. What the numbers mean is the loss hub's to judge.
"""

from __future__ import annotations

import math
import re
from typing import Any, Generic, TypeVar

import msgspec

from bus import sdk_sample, sdk_wire
from bus.errors import CodecError, NewerFormat, newer_format
from bus.events import (
    FORMAT,
    Array,
    CreateModel,
    Datum,
    Event,
    ForwardBackward,
    ForwardBackwardDone,
    Op,
    OptimStepDone,
    Refused,
    Result,
    Sampled,
    Submission,
    Tensor,
    UnloadModel,
)
from bus.tensors import checked, unpack

__all__ = [
    "JSON",
    "MSGPACK",
    "PROTOBUF",
    "CodecError",
    "NewerFormat",
    "datum_sizes",
    "decode_op",
    "decode_result",
    "decode_submission",
    "encode",
    "peek_forward_backward",
    "peek_forward_only",
    "result_to_sdk_protobuf",
    "sampled_to_sdk_protobuf",
]

MSGPACK = "application/msgpack"
JSON = "application/json"
PROTOBUF = "application/x-protobuf"
"""Only `forward_backward` travels as protobuf: the SDK's `ForwardBackwardRequest`, verbatim."""

T = TypeVar("T")
A = TypeVar("A", Tensor, Array)

_PATH = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>[^`]*)`)?$", re.DOTALL)
_NAMED = re.compile(r"field `(?P<name>[^`]+)`$")


class _Head(msgspec.Struct):
    """What can be read of a message whose rest cannot."""

    format: int = FORMAT
    seq_id: int | None = None


class _Schema(Generic[T]):
    """The decoders of one type."""

    def __init__(self, type_: Any) -> None:
        self._decoders: dict[str, Any] = {
            MSGPACK: msgspec.msgpack.Decoder(type_),
            JSON: msgspec.json.Decoder(type_),
        }

    def decode(self, body: bytes, content_type: str) -> T:
        """Raises CodecError, NewerFormat."""
        decoder = self._decoders.get(content_type)
        if decoder is None:
            raise CodecError(
                f"content type {content_type!r} cannot be read here: use one of {', '.join(self._decoders)}",
                "content_type",
            )
        try:
            result: T = decoder.decode(body)
        except _MALFORMED as error:
            raise _explained(error, body, content_type) from None
        return result


_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_op: _Schema[Op] = _Schema(Op)
_submission: _Schema[Submission] = _Schema(Submission)
_result: _Schema[Result] = _Schema(Result)
_heads: dict[str, Any] = {MSGPACK: msgspec.msgpack.Decoder(_Head), JSON: msgspec.json.Decoder(_Head)}


def encode(obj: Event, content_type: str = MSGPACK) -> bytes:
    """One event as bytes. In JSON a tensor's `data` is a list of numbers, or base64 where one is not finite.

    Raises CodecError for a metric that is not finite in JSON, which has no word for it, and for a whole number of
    more than 64 bits.
    """
    if content_type == MSGPACK:
        try:
            return msgspec.msgpack.encode(obj)
        except OverflowError as error:
            raise CodecError(f"a whole number has more than 64 bits: {error}") from None
    if content_type == JSON:
        return msgspec.json.encode(_with_lists(obj))
    raise CodecError(
        f"content type {content_type!r} cannot be written: use {MSGPACK} or {JSON}", "content_type"
    )


def decode_op(body: bytes, content_type: str, format_number: int = FORMAT) -> Op:
    """The operation in a log entry's body. `format_number` is the one the entry was written with."""
    if format_number > FORMAT:
        raise newer_format(format_number, FORMAT)
    if content_type == PROTOBUF:
        return sdk_wire.to_op(body)
    return _checked_op(_op.decode(body, content_type))


def decode_submission(body: bytes, content_type: str) -> Submission:
    """What an event client published. A CodecError carries the `seq_id` where it could be read."""
    if content_type == PROTOBUF:
        seq_id: int | None = sdk_wire.parse_request(body).seq_id
        try:
            return Submission(seq_id=seq_id, op=sdk_wire.to_op(body))
        except CodecError as error:
            error.seq_id = seq_id
            raise
    submission = _submission.decode(body, content_type)
    if submission.format > FORMAT:
        raise newer_format(submission.format, FORMAT, _plausible(submission.seq_id))
    try:
        _check_number(submission)
        return msgspec.structs.replace(submission, op=_checked_op(submission.op))
    except CodecError as error:
        error.seq_id = _plausible(submission.seq_id)
        raise


def decode_result(body: bytes, content_type: str) -> Result:
    result = _result.decode(body, content_type)
    if result.format > FORMAT:
        raise newer_format(result.format, FORMAT)
    if isinstance(result.outcome, ForwardBackwardDone):
        outputs = tuple(
            {name: checked(t, f"loss_fn_outputs[{i}].{name}") for name, t in datum.items()}
            for i, datum in enumerate(result.outcome.loss_fn_outputs)
        )
        outcome = msgspec.structs.replace(result.outcome, loss_fn_outputs=outputs)
        return msgspec.structs.replace(result, outcome=outcome)
    return result


def peek_forward_backward(body: bytes) -> tuple[str, int]:
    """(model_id, seq_id) of an SDK protobuf body. Raises CodecError where it does not parse."""
    request = sdk_wire.parse_request(body)
    return str(request.model_id), int(request.seq_id)


def peek_forward_only(body: bytes) -> bool:
    """Whether an SDK protobuf body asks for no gradient. Raises CodecError where it does not parse."""
    return bool(sdk_wire.parse_request(body).forward_only)


def datum_sizes(body: bytes) -> list[int]:
    """Bytes of each datum in an SDK protobuf body. Raises CodecError where it does not parse."""
    return [datum.ByteSize() for datum in sdk_wire.parse_request(body).data]


def result_to_sdk_protobuf(done: ForwardBackwardDone) -> bytes:
    """The `ForwardBackwardOutput` that the SDK's poll expects."""
    return sdk_wire.from_result(done)


def sampled_to_sdk_protobuf(sampled: Sampled) -> bytes:
    """The `SampleResponse` that the SDK's poll expects."""
    return sdk_sample.from_sampled(sampled)


def _explained(error: Exception, body: bytes, content_type: str) -> CodecError:
    try:
        head = _heads[content_type].decode(body)
    except _MALFORMED:
        head = _Head()
    seq_id = _plausible(head.seq_id)
    if head.format > FORMAT:
        return newer_format(head.format, FORMAT, seq_id)
    if not isinstance(error, msgspec.ValidationError):
        return CodecError(f"the body is not {content_type}: {error}", seq_id=seq_id)
    found = _PATH.match(str(error))
    what, path = (found["what"], found["path"] or "") if found else (str(error), "")
    if named := _NAMED.search(what):
        path = f"{path}.{named['name']}"
    path = path.lstrip(".").removeprefix("op.")
    return CodecError(f"{path or 'the body'}: {what}", path or None, seq_id=seq_id)


def _plausible(seq_id: int | None) -> int | None:
    return seq_id if seq_id is not None and 0 <= seq_id < 2**63 else None


def _check_number(submission: Submission) -> None:
    seq_id, op = submission.seq_id, submission.op
    if isinstance(op, Refused):
        raise CodecError("op.type 'refused' is written by servers only", "type")
    if isinstance(op, UnloadModel):
        if seq_id is not None:
            raise CodecError(f"seq_id is {seq_id}, but unload_model has none: leave it null", "seq_id")
    elif isinstance(op, CreateModel):
        if seq_id != 0:
            raise CodecError(f"seq_id is {seq_id}, but create_model is always number 0", "seq_id")
    elif seq_id is None or not 1 <= seq_id < 2**63:
        raise CodecError(f"seq_id is {seq_id}, but this operation has a number of 1 or more", "seq_id")


def _checked_op(op: Op) -> Op:
    if not isinstance(op, ForwardBackward):
        return op
    data = tuple(
        Datum(
            model_input=_checked_array(datum.model_input, f"data[{i}].model_input"),
            loss_fn_inputs={
                name: _checked_array(array, f"data[{i}].loss_fn_inputs.{name}")
                for name, array in datum.loss_fn_inputs.items()
            },
        )
        for i, datum in enumerate(op.data)
    )
    return ForwardBackward(data=data, loss=op.loss, forward_only=op.forward_only)


def _checked_array(array: Array, field: str) -> Array:
    return checked(array, field) if isinstance(array, Tensor) else array


def _with_lists(obj: T) -> T:
    """The same event with every tensor's bytes as a list of numbers."""
    event: Any = obj
    if isinstance(event, Submission):
        event = msgspec.structs.replace(event, op=_with_lists(event.op))
    elif isinstance(event, Result):
        event = msgspec.structs.replace(event, outcome=_with_lists(event.outcome))
    elif isinstance(event, ForwardBackward):
        event = msgspec.structs.replace(event, data=tuple(map(_with_lists, event.data)))
    elif isinstance(event, Datum):
        event = Datum(
            model_input=_listed(event.model_input),
            loss_fn_inputs={name: _listed(array) for name, array in event.loss_fn_inputs.items()},
        )
    elif isinstance(event, ForwardBackwardDone | OptimStepDone):
        for name, value in event.metrics.items():
            if not math.isfinite(value):
                raise CodecError(
                    f"metrics.{name} is {value}, which JSON cannot say: use {MSGPACK}", f"metrics.{name}"
                )
        if isinstance(event, ForwardBackwardDone):
            outputs = tuple(
                {name: _listed(t) for name, t in datum.items()} for datum in event.loss_fn_outputs
            )
            event = msgspec.structs.replace(event, loss_fn_outputs=outputs)
    result: T = event
    return result


def _listed(array: A) -> A | Tensor:
    if not isinstance(array, Tensor) or not isinstance(array.data, bytes):
        return array
    numbers = unpack(array)
    if array.dtype == "float32" and not all(map(math.isfinite, numbers)):
        return array
    return Tensor(dtype=array.dtype, shape=array.shape, data=numbers)
