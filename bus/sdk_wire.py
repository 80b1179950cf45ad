"""The SDK's `forward_backward` body to our op, and our result to the SDK's output.

Bytes pass through unchanged wherever the two agree. Provenance spans are accepted and left aside: no loss of ours
asks for them.
"""

from __future__ import annotations

import struct
from typing import Any

from google.protobuf.message import DecodeError

from bus import wire
from bus.errors import CodecError
from bus.events import (
    ITEM_SIZE,
    Array,
    Datum,
    DType,
    ForwardBackward,
    ForwardBackwardDone,
    LossChoice,
    Tensor,
)
from bus.tensors import bfloat16_to_float32, checked, densify

MAX_DENSE_BYTES = 256 * 2**20
"""What the sparse tensors of one request may take when dense; a few bytes of CSR can name a matrix of any size."""

_DTYPES: dict[int, DType] = {
    wire.FLOAT32: "float32",
    wire.BFLOAT16: "float32",
    wire.INT64: "int64",
    wire.INT32: "int32",
}
_WIRE_DTYPES = {"float32": wire.FLOAT32, "int64": wire.INT64, "int32": wire.INT32}


def parse_request(body: bytes) -> Any:
    """The protobuf message, with its identity checked. Raises CodecError."""
    request = wire.ForwardBackwardRequest()
    try:
        request.ParseFromString(body)
    except DecodeError as error:
        raise CodecError(f"the body is no tinker ForwardBackwardRequest: {error}") from None
    if not request.model_id:
        raise CodecError("model_id is missing", "model_id")
    if request.seq_id < 1:
        raise CodecError(f"seq_id is {request.seq_id}, but a request has a number of 1 or more", "seq_id")
    return request


def to_op(body: bytes) -> ForwardBackward:
    """The operation in an SDK body. Raises CodecError that names the field."""
    request = parse_request(body)
    if not request.data:
        raise CodecError("data is empty, but a request needs at least one datum", "data")
    if not request.loss_fn:
        raise CodecError("loss.name is missing", "loss.name")
    budget = MAX_DENSE_BYTES
    data = []
    for i, message in enumerate(request.data):
        inputs: dict[str, Array] = {}
        for name, value in message.loss_fn_inputs.items():
            tensor = _tensor(value, f"data[{i}].loss_fn_inputs.{name}", budget)
            if value.HasField("sparse_csr"):
                budget -= len(tensor.data)
            inputs[name] = tensor
        data.append(
            Datum(
                model_input=_tokens(message.model_input, f"data[{i}].model_input"),
                loss_fn_inputs=inputs,
            )
        )
    return ForwardBackward(
        data=tuple(data),
        loss=LossChoice(name=request.loss_fn, config=_config(request)),
        forward_only=request.forward_only,
    )


def _config(request: Any) -> dict[str, float | str]:
    """Both maps are written by the SDK; the newer one also knows strings and is preferred."""
    config: dict[str, float | str] = dict(request.loss_fn_config)
    for key, value in request.loss_fn_config_v2.items():
        kind = value.WhichOneof("value")
        if kind is None:
            raise CodecError(f"loss.config.{key} is neither a number nor a text", f"loss.config.{key}")
        config[key] = getattr(value, kind)
    return config


def _tokens(chunks: Any, field: str) -> Tensor:
    """All chunks of one model input, as one row of token ids."""
    parts = []
    for j, chunk in enumerate(chunks):
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            what = {"image": "an image", "dmel": "audio (dmel)"}.get(kind, "empty or of an unknown kind")
            raise CodecError(f"{field}[{j}] is {what}, but this server trains on text tokens only", field)
        parts.append(chunk.encoded_text.tokens)
    data = b"".join(parts)
    if len(data) % 4:
        raise CodecError(f"{field} has {len(data)} bytes, which is no whole number of int32 tokens", field)
    return Tensor(dtype="int32", shape=(len(data) // 4,), data=data)


def _tensor(message: Any, field: str, budget: int) -> Tensor:
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise CodecError(
            f"{field}.dtype is {message.dtype}, which is none of {sorted(_DTYPES)}", f"{field}.dtype"
        )
    shape = tuple(message.shape)
    kind = message.WhichOneof("encoding")
    if kind == "sparse_csr":
        csr = message.sparse_csr
        values = csr.values
        if message.dtype == wire.BFLOAT16:
            values = bfloat16_to_float32(values, f"{field}.sparse_csr.values")
        return densify(values, csr.crow_indices, csr.col_indices, shape, dtype, field, budget)
    if kind is None:
        raise CodecError(f"{field} has neither dense nor sparse values", field)
    data = bfloat16_to_float32(message.dense, field) if message.dtype == wire.BFLOAT16 else message.dense
    if not shape:  # the SDK leaves it out when the user gave none
        size = ITEM_SIZE[dtype]
        if len(data) % size:
            raise CodecError(
                f"{field} has {len(data)} bytes, which is no whole number of {dtype} values", field
            )
        shape = (len(data) // size,)
    return checked(Tensor(dtype=dtype, shape=shape, data=data), field)


def from_result(done: ForwardBackwardDone) -> bytes:
    """A `ForwardBackwardOutput`. Datums that agree in their fields, dtypes and trailing shapes share a record."""
    output = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    output.metrics.update(done.metrics)
    record: Any = None
    layout: object = None
    group: list[dict[str, Tensor]] = []
    for datum in done.loss_fn_outputs:
        this = sorted((name, t.dtype, t.shape[1:]) for name, t in datum.items())
        if record is None or this != layout:
            if record is not None:
                _fill(record, group)
            record = output.loss_fn_outputs.add(type_tag="ArrayRecord")
            layout, group = this, []
        group.append(datum)
    if record is not None:
        _fill(record, group)
    result: bytes = output.SerializeToString()
    return result


def _fill(record: Any, group: list[dict[str, Tensor]]) -> None:
    record.num_datums = len(group)
    for name, first in group[0].items():
        field = record.fields[name]
        parts = [checked(datum[name], name).data for datum in group]
        offsets = [0]
        for part in parts:
            offsets.append(offsets[-1] + len(part))
        field.data = b"".join(p for p in parts if isinstance(p, bytes))
        field.offsets = struct.pack(f"<{len(offsets)}q", *offsets)
        field.dtype = _WIRE_DTYPES[first.dtype]
        field.trailing_shape.extend(first.shape[1:])
