"""The message classes of the SDK's protobuf wire: `ForwardBackwardRequest`, `ForwardBackwardOutput`, `SampleResponse`.

They are built from the field table below in a descriptor pool of their own, so that this module and the SDK's
generated one can live in one process. The tables are the SDK's `tinker_public` package, proto3; fields that a
newer SDK may add are skipped by the parser, as protobuf always does.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "tinker_public"

UNSPECIFIED, FLOAT32, INT64, INT32, BFLOAT16 = range(5)
"""The values of the enum `DType`."""
STOP_REASONS = {"stop": 0, "length": 1}
"""The values of the enum `StopReason`."""

_SCALARS = {"string": 9, "bytes": 12, "bool": 8, "double": 1, "int32": 5, "int64": 3, "uint32": 13}
_OPTIONAL, _REPEATED, _MESSAGE, _ENUM = 1, 3, 11, 14

_FIELDS: dict[str, str] = {
    "SparseCsr": "1 bytes values; 2 bytes crow_indices; 3 bytes col_indices",
    "Tensor": "1 bytes dense @encoding; 2 SparseCsr sparse_csr @encoding; 3 DType dtype; 4 repeated int64 shape",
    "EncodedTextChunk": "1 bytes tokens",
    "ImageDimensions": "1 uint32 width; 2 uint32 height",
    "ImageChunk": "1 bytes data; 2 string format; 4 ImageDimensions override_dimensions",
    "DmelChunk": "1 bytes dmel",
    "Chunk": "1 EncodedTextChunk encoded_text @chunk; 2 ImageChunk image @chunk; 3 DmelChunk dmel @chunk",
    "PromptProvenanceSpan": "1 string sequence_id; 2 int64 offset; 3 int64 length",
    "SampledProvenanceSpan": "1 string sequence_id; 2 int64 offset; 3 int64 length",
    "ProvenanceSpan": "1 PromptProvenanceSpan prompt_tokens @span; 2 SampledProvenanceSpan sampled_tokens @span",
    "Datum": "1 repeated Chunk model_input; 2 map Tensor loss_fn_inputs; "
    "3 repeated ProvenanceSpan model_input_spans; 4 repeated ProvenanceSpan loss_fn_input_spans",
    "LossConfigValue": "1 double number @value; 2 string text @value",
    "ForwardBackwardRequest": "1 string model_id; 2 int32 seq_id; 3 repeated Datum data; 4 string loss_fn; "
    "5 map double loss_fn_config; 6 bool forward_only; 7 map LossConfigValue loss_fn_config_v2",
    "BatchedTensor": "1 bytes data; 2 bytes offsets; 3 DType dtype; 4 repeated int64 trailing_shape",
    "ArrayRecord": "1 string type_tag; 2 map BatchedTensor fields; 3 int64 num_datums",
    "ForwardBackwardOutput": "1 string loss_fn_output_type; 2 repeated ArrayRecord loss_fn_outputs; "
    "3 map double metrics",
    "TopkLogprobs": "1 bytes token_ids; 2 bytes logprobs; 3 uint32 k; 4 uint32 length",
    "SampledSequence": "1 StopReason stop_reason; 2 bytes tokens; 3 bytes logprobs; "
    "4 TopkLogprobs topk_sampled_logprobs",
    "PromptAltTokens": "1 Tensor tokens; 2 Tensor logprobs",
    "SampleResponse": "1 repeated SampledSequence sequences; 2 bytes prompt_logprobs; "
    "3 TopkLogprobs topk_prompt_logprobs; 4 int32 prompt_cache_hit_tokens; 5 Tensor target_prompt_logprobs; "
    "6 PromptAltTokens prompt_alt_tokens",
}
_ENUMS = {
    "DType": ("DTYPE", ("UNSPECIFIED", "FLOAT32", "INT64", "INT32", "BFLOAT16")),
    "StopReason": ("STOP_REASON", ("STOP", "LENGTH")),
}
"""By name: what the names of the values begin with, and the values from 0 on."""


def _add_field(message: Any, number: int, label: str, kind: str, name: str) -> Any:
    field = message.field.add(name=name, number=number, label=_REPEATED if label else _OPTIONAL)
    if label == "map":
        entry = message.nested_type.add(name="".join(part.capitalize() for part in name.split("_")) + "Entry")
        entry.options.map_entry = True
        _add_field(entry, 1, "", "string", "key")
        _add_field(entry, 2, "", kind, "value")
        field.type, field.type_name = _MESSAGE, f".{PACKAGE}.{message.name}.{entry.name}"
    elif kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _ENUM if kind in _ENUMS else _MESSAGE
        field.type_name = f".{PACKAGE}.{kind}"
    return field


def _file() -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name="tinkerbus/tinker_public.proto", package=PACKAGE, syntax="proto3"
    )
    for enum_name, (prefix, values) in _ENUMS.items():
        enum = file.enum_type.add(name=enum_name)
        for number, name in enumerate(values):
            enum.value.add(name=f"{prefix}_{name}", number=number)
    for message_name, rows in _FIELDS.items():
        message = file.message_type.add(name=message_name)
        for row in rows.split("; "):
            declaration, _, oneof = row.partition(" @")
            tag, *label, kind, name = declaration.split()
            field = _add_field(message, int(tag), label[0] if label else "", kind, name)
            if oneof:
                if not message.oneof_decl:
                    message.oneof_decl.add(name=oneof)
                field.oneof_index = 0
    return file


_pool = descriptor_pool.DescriptorPool()
_pool.Add(_file())


def _message_class(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))


ForwardBackwardRequest: Any = _message_class("ForwardBackwardRequest")
ForwardBackwardOutput: Any = _message_class("ForwardBackwardOutput")
SampleResponse: Any = _message_class("SampleResponse")
