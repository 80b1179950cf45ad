"""`forward` and `forward_backward` as JSON, and their results: how SDKs before protobuf send and read them.

The same operation goes onto the log as from any other client; only its spelling differs.
"""

from __future__ import annotations

from typing import Any, Literal

from bus.errors import CodecError
from bus.events import Datum, ForwardBackward, ForwardBackwardDone, LossChoice, Tensor
from bus.sdk_wire import MAX_DENSE_BYTES
from bus.tensors import checked, densify, pack, unpack
from runtime.ingress.answers import number
from runtime.ingress.body import convert
from runtime.ingress.requests import SdkRequest

Number = int | float


class TextChunk(SdkRequest, frozen=True):
    tokens: list[int]
    type: Literal["encoded_text"] = "encoded_text"


class JsonInput(SdkRequest, frozen=True):
    chunks: list[TextChunk]


class JsonTensor(SdkRequest, frozen=True):
    data: list[Number]
    dtype: Literal["int64", "float32"]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class JsonDatum(SdkRequest, frozen=True):
    model_input: JsonInput
    loss_fn_inputs: dict[str, JsonTensor]


class JsonBatch(SdkRequest, frozen=True):
    data: list[JsonDatum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class ForwardBackwardRequest(SdkRequest, frozen=True):
    model_id: str
    seq_id: int
    forward_backward_input: JsonBatch
    type: Literal["forward_backward"] = "forward_backward"


class ForwardRequest(SdkRequest, frozen=True):
    model_id: str
    seq_id: int
    forward_input: JsonBatch
    type: Literal["forward"] = "forward"


def forward_backward(fields: dict[str, Any]) -> ForwardBackward:
    """Raises CodecError for what cannot be honoured."""
    return _op(convert(fields, ForwardBackwardRequest).forward_backward_input, forward_only=False)


def forward(fields: dict[str, Any]) -> ForwardBackward:
    """Raises CodecError for what cannot be honoured."""
    return _op(convert(fields, ForwardRequest).forward_input, forward_only=True)


def result(done: ForwardBackwardDone) -> dict[str, Any]:
    """The SDK's `ForwardBackwardOutput`."""
    return {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": [
            {name: _as_json(tensor) for name, tensor in outputs.items()} for outputs in done.loss_fn_outputs
        ],
        "metrics": {name: number(value) for name, value in done.metrics.items()},
    }


def wanted(accept: str) -> bool:
    """Whether who sent this Accept header reads JSON and not protobuf."""
    kinds = {part.partition(";")[0].strip().lower() for part in accept.split(",")}
    return "application/json" in kinds and kinds.isdisjoint(
        {"application/x-protobuf", "application/*", "*/*"}
    )


def _op(batch: JsonBatch, *, forward_only: bool) -> ForwardBackward:
    if not batch.data:
        raise CodecError("data is empty, but a request needs at least one datum", "data")
    budget = MAX_DENSE_BYTES
    data = []
    for i, datum in enumerate(batch.data):
        inputs = {}
        for name, tensor in datum.loss_fn_inputs.items():
            inputs[name] = _tensor(tensor, f"data[{i}].loss_fn_inputs.{name}", budget)
            if tensor.sparse_crow_indices is not None:
                budget -= len(inputs[name].data)
        tokens = [token for chunk in datum.model_input.chunks for token in chunk.tokens]
        row = pack(tokens, "int32", f"data[{i}].model_input")
        data.append(
            Datum(
                model_input=Tensor(dtype="int32", shape=(len(tokens),), data=row),
                loss_fn_inputs=dict(inputs),
            )
        )
    loss = LossChoice(name=batch.loss_fn, config=batch.loss_fn_config or {})
    return ForwardBackward(data=tuple(data), loss=loss, forward_only=forward_only)


def _tensor(sent: JsonTensor, field: str, budget: int) -> Tensor:
    values = pack(sent.data, sent.dtype, field)
    shape = (len(sent.data),) if sent.shape is None else tuple(sent.shape)
    if sent.sparse_crow_indices is None and sent.sparse_col_indices is None:
        return checked(Tensor(dtype=sent.dtype, shape=shape, data=values), field)
    crow = pack(sent.sparse_crow_indices or (), "int64", f"{field}.sparse_crow_indices")
    col = pack(sent.sparse_col_indices or (), "int64", f"{field}.sparse_col_indices")
    return densify(values, crow, col, shape, sent.dtype, field, budget)


def _as_json(tensor: Tensor) -> dict[str, Any]:
    """`dtype` is one of the two that the SDK knows."""
    return {
        "data": [number(value) for value in unpack(tensor)],
        "dtype": "float32" if tensor.dtype == "float32" else "int64",
        "shape": list(tensor.shape),
    }


__all__ = ["ForwardBackwardRequest", "ForwardRequest", "forward", "forward_backward", "result", "wanted"]
