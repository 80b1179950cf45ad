"""Against the real SDK: requests encoded by it, outputs decoded by it."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch
from tinker import types
from tinker.proto import tinker_public_pb2 as sdk
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output

from bus import wire
from bus.codec import (
    PROTOBUF,
    CodecError,
    decode_op,
    decode_submission,
    peek_forward_backward,
    peek_forward_only,
    result_to_sdk_protobuf,
)
from bus.events import ForwardBackward, ForwardBackwardDone, Tensor
from bus.tensors import unpack


def request(
    datums: list[Any], loss: str = "cross_entropy", config: dict[str, float | str] | None = None
) -> Any:
    from tinker.types.forward_backward_input import ForwardBackwardInput
    from tinker.types.forward_backward_request import ForwardBackwardRequest

    return forward_backward_request_to_proto(
        ForwardBackwardRequest(
            forward_backward_input=ForwardBackwardInput(data=datums, loss_fn=loss, loss_fn_config=config),
            model_id="run:train:0",
            seq_id=7,
        )
    )


def datum(tokens: list[int], **inputs: Any) -> Any:
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def decoded(message: Any) -> ForwardBackward:
    op = decode_op(message.SerializeToString(), PROTOBUF)
    assert isinstance(op, ForwardBackward)
    return op


def refused(message: Any) -> CodecError:
    with pytest.raises(CodecError) as caught:
        decode_op(message.SerializeToString(), PROTOBUF)
    return caught.value


def floats(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def test_our_message_tables_are_the_sdks() -> None:
    """Field by field: number, type, label, and the oneof it belongs to."""
    for ours in (wire.ForwardBackwardRequest.DESCRIPTOR, wire.ForwardBackwardOutput.DESCRIPTOR):
        todo = [(ours, sdk.DESCRIPTOR.message_types_by_name[ours.name])]
        seen = set()
        while todo:
            mine, theirs = todo.pop()
            if mine.full_name in seen:
                continue
            seen.add(mine.full_name)
            for field in mine.fields:
                other = theirs.fields_by_name[field.name]
                assert (field.number, field.type, field.is_repeated) == (
                    other.number,
                    other.type,
                    other.is_repeated,
                )
                if field.containing_oneof is not None:
                    assert field.containing_oneof.name == other.containing_oneof.name
                if field.message_type is not None:
                    todo.append((field.message_type, other.message_type))
            left_out = {f.name for f in theirs.fields} - {f.name for f in mine.fields}
            assert left_out <= {"expected_tokens"}


def test_a_request_of_the_sdk_is_read_as_it_was_meant() -> None:
    op = decoded(
        request(
            [
                datum([1, 2, 3], target_tokens=[2, 3, 4], weights=[0.0, 1.0, -0.5]),
                datum([9], target_tokens=[10], weights=[1.0]),
            ]
        )
    )
    assert op.loss.name == "cross_entropy"
    assert op.loss.config == {}
    assert not op.forward_only
    first = op.data[0]
    assert first.model_input == Tensor(dtype="int32", shape=(3,), data=struct.pack("<3i", 1, 2, 3))
    assert first.loss_fn_inputs == {
        "target_tokens": Tensor(dtype="int64", shape=(3,), data=struct.pack("<3q", 2, 3, 4)),
        "weights": Tensor(dtype="float32", shape=(3,), data=floats(0, 1, -0.5)),
    }
    assert op.data[1].model_input == Tensor(dtype="int32", shape=(1,), data=struct.pack("<i", 9))


def test_text_chunks_are_joined() -> None:
    chunks = [types.EncodedTextChunk(tokens=[1, 2]), types.EncodedTextChunk(tokens=[3])]
    op = decoded(
        request(
            [types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs={"weights": [1.0] * 3})]
        )
    )
    assert unpack(op.data[0].model_input) == (1, 2, 3)  # type: ignore[arg-type]


def test_config_comes_from_the_newer_map_first_then_from_the_older() -> None:
    message = request([datum([1], target_tokens=[2])], "ppo", {"clip_low_threshold": 0.9, "mode": "strict"})
    assert decoded(message).loss.config == {"clip_low_threshold": 0.9, "mode": "strict"}
    message.loss_fn_config["clip_low_threshold"] = 0.5
    message.loss_fn_config["clip_high_threshold"] = 1.5
    assert decoded(message).loss.config == {
        "clip_low_threshold": 0.9,
        "mode": "strict",
        "clip_high_threshold": 1.5,
    }


def test_a_config_value_that_is_neither_number_nor_text_is_named() -> None:
    message = request([datum([1], target_tokens=[2])], "ppo")
    message.loss_fn_config_v2["beta"].SetInParent()
    assert refused(message).field == "loss.config.beta"


def test_sparse_targets_and_weights_of_the_sdk_are_densified_with_zero_each_on_its_own() -> None:
    targets = torch.zeros(6, 8, dtype=torch.int64)
    weights = torch.zeros(6, 8)
    targets[0, 0], targets[3, 7] = 11, 12
    weights[0, 0], weights[3, 6] = 0.25, -1.0  # (3, 6) is token id 0 with a weight
    message = request([datum([1] * 6, target_tokens=targets, weights=weights)])
    tensors = message.data[0].loss_fn_inputs
    assert tensors["target_tokens"].HasField("sparse_csr")
    assert tensors["weights"].HasField("sparse_csr")
    inputs = decoded(message).data[0].loss_fn_inputs
    assert inputs["target_tokens"] == Tensor(dtype="int64", shape=(6, 8), data=targets.numpy().tobytes())
    assert inputs["weights"] == Tensor(dtype="float32", shape=(6, 8), data=weights.numpy().tobytes())


def test_a_sparse_tensor_that_lies_about_its_shape_is_refused_by_field() -> None:
    weights = torch.zeros(6, 8)
    weights[0, 0] = 1
    message = request([datum([1] * 6, target_tokens=[1] * 6, weights=weights)])
    message.data[0].loss_fn_inputs["weights"].shape[0] = 5
    assert refused(message).field == "data[0].loss_fn_inputs.weights.sparse_csr.crow_indices"


def test_sparse_tensors_of_one_request_share_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bus.sdk_wire.MAX_DENSE_BYTES", 300)
    weights = torch.zeros(6, 8)  # 192 bytes when dense
    weights[0, 0] = 1
    assert decoded(request([datum([1] * 6, weights=weights)]))
    error = refused(request([datum([1] * 6, weights=weights)] * 2))
    assert error.field == "data[1].loss_fn_inputs.weights"
    assert "has 108 left" in str(error)


def test_a_missing_shape_means_one_dimension() -> None:
    tensor = types.TensorData(data=[1.0, 2.0], dtype="float32")
    message = request([datum([1, 2], weights=tensor)])
    assert not message.data[0].loss_fn_inputs["weights"].shape
    assert decoded(message).data[0].loss_fn_inputs["weights"] == Tensor(
        dtype="float32", shape=(2,), data=floats(1, 2)
    )


def test_bfloat16_and_int32_are_understood() -> None:
    message = request([datum([1, 2], weights=[1.0, 1.0])])
    tensor = message.data[0].loss_fn_inputs["weights"]
    tensor.dtype, tensor.dense = sdk.DTYPE_BFLOAT16, b"\xc0\x3f\x00\xc0"  # 1.5 and -2
    other = message.data[0].loss_fn_inputs["target_tokens"]
    other.dtype, other.dense = sdk.DTYPE_INT32, struct.pack("<2i", 5, 6)
    inputs = decoded(message).data[0].loss_fn_inputs
    assert inputs["weights"] == Tensor(dtype="float32", shape=(2,), data=floats(1.5, -2))
    assert inputs["target_tokens"] == Tensor(dtype="int32", shape=(2,), data=struct.pack("<2i", 5, 6))


@pytest.mark.parametrize("cut", [1, 4])
def test_a_dense_tensor_of_the_wrong_length_is_refused_by_field(cut: int) -> None:
    message = request([datum([1, 2], weights=[1.0, 1.0])])
    tensor = message.data[0].loss_fn_inputs["weights"]
    tensor.dense = tensor.dense[:-cut]
    assert refused(message).field == "data[0].loss_fn_inputs.weights"


def test_an_unknown_dtype_an_empty_tensor_and_odd_tokens_are_refused_by_field() -> None:
    message = request([datum([1, 2], weights=[1.0, 1.0])])
    message.data[0].loss_fn_inputs["weights"].dtype = 17
    assert refused(message).field == "data[0].loss_fn_inputs.weights.dtype"
    message = request([datum([1, 2], weights=[1.0, 1.0])])
    message.data[0].loss_fn_inputs["weights"].ClearField("dense")
    assert refused(message).field == "data[0].loss_fn_inputs.weights"
    message = request([datum([1, 2], weights=[1.0, 1.0])])
    message.data[0].model_input[0].encoded_text.tokens = b"\0\0\0"
    assert refused(message).field == "data[0].model_input"


def test_images_and_audio_are_refused_by_name() -> None:
    message = request([datum([1], weights=[1.0])] * 2)
    message.data[1].model_input.add().image.data = b"png"
    error = refused(message)
    assert error.field == "data[1].model_input"
    assert "model_input[1] is an image" in str(error)
    message.data[1].model_input[1].dmel.dmel = b"x"
    assert "is audio (dmel)" in str(refused(message))


def test_empty_requests_are_refused_by_field() -> None:
    message = request([])
    assert refused(message).field == "data"
    message = request([datum([1], weights=[1.0])])
    message.loss_fn = ""
    assert refused(message).field == "loss.name"


def test_identity_is_read_without_the_rest() -> None:
    message = request([datum([1], weights=[1.0])])
    assert peek_forward_backward(message.SerializeToString()) == ("run:train:0", 7)
    for field, value in (("seq_id", 0), ("seq_id", -1), ("model_id", "")):
        broken = sdk.ForwardBackwardRequest()
        broken.CopyFrom(message)
        setattr(broken, field, value)
        with pytest.raises(CodecError) as caught:
            peek_forward_backward(broken.SerializeToString())
        assert caught.value.field == field
    with pytest.raises(CodecError, match="no tinker ForwardBackwardRequest"):
        peek_forward_backward(b"\x0a\xff")


def test_a_forward_is_told_from_a_forward_backward_also_where_its_data_cannot_be_read() -> None:
    message = request([datum([1], weights=[1.0])])
    message.data[0].loss_fn_inputs["weights"].dtype = 17
    for forward_only in (False, True):
        message.forward_only = forward_only
        assert peek_forward_only(message.SerializeToString()) is forward_only


def test_a_submission_may_carry_the_sdks_bytes_and_keeps_its_number_when_refused() -> None:
    message = request([datum([1], weights=[1.0])])
    assert decode_submission(message.SerializeToString(), PROTOBUF).seq_id == 7
    message.data[0].loss_fn_inputs["weights"].dtype = 17
    with pytest.raises(CodecError) as caught:
        decode_submission(message.SerializeToString(), PROTOBUF)
    assert caught.value.seq_id == 7


# ------------------------------------------------------------------------------------------------ the way back


def logprobs(*numbers: float, shape: tuple[int, ...] | None = None) -> Tensor:
    return Tensor(dtype="float32", shape=shape or (len(numbers),), data=floats(*numbers))


def test_the_sdk_reads_our_output() -> None:
    done = ForwardBackwardDone(
        loss_fn_outputs=({"logprobs": logprobs(-1, -2.5, float("-inf"))}, {"logprobs": logprobs(-0.125)}),
        metrics={"loss:sum": 3.5, "tokens:sum": 4.0},
    )
    output = deserialize_forward_backward_output(result_to_sdk_protobuf(done))
    assert output.metrics == {"loss:sum": 3.5, "tokens:sum": 4.0}
    assert [d["logprobs"].data for d in output.loss_fn_outputs] == [[-1.0, -2.5, float("-inf")], [-0.125]]
    assert [d["logprobs"].shape for d in output.loss_fn_outputs] == [[3], [1]]
    assert {d["logprobs"].dtype for d in output.loss_fn_outputs} == {"float32"}


def test_datums_of_one_layout_share_a_record_with_byte_offsets() -> None:
    done = ForwardBackwardDone(
        loss_fn_outputs=(
            {"logprobs": logprobs(-1, -2)},
            {"logprobs": logprobs(-3)},
            {"logprobs": logprobs()},
        ),
        metrics={},
    )
    message = sdk.ForwardBackwardOutput.FromString(result_to_sdk_protobuf(done))
    (record,) = message.loss_fn_outputs
    field = record.fields["logprobs"]
    assert record.num_datums == 3
    assert np.frombuffer(field.offsets, dtype="<i8").tolist() == [0, 8, 12, 12]
    assert field.dtype == sdk.DTYPE_FLOAT32
    assert list(field.trailing_shape) == []


def test_ragged_layouts_keep_order_and_shape() -> None:
    done = ForwardBackwardDone(
        loss_fn_outputs=(
            {"logprobs": logprobs(-1, -2, -3, -4, shape=(2, 2))},
            {"logprobs": logprobs(-5, -6, -7, shape=(1, 3))},
            {"logprobs": logprobs(-8)},
        ),
        metrics={},
    )
    body = result_to_sdk_protobuf(done)
    assert sum(r.num_datums for r in sdk.ForwardBackwardOutput.FromString(body).loss_fn_outputs) == 3
    outputs = deserialize_forward_backward_output(body).loss_fn_outputs
    assert [d["logprobs"].shape for d in outputs] == [[2, 2], [1, 3], [1]]
    assert [d["logprobs"].data for d in outputs] == [[-1, -2, -3, -4], [-5, -6, -7], [-8]]


def test_outputs_without_any_field_still_count() -> None:
    done = ForwardBackwardDone(loss_fn_outputs=({}, {}), metrics={"loss:sum": 0.0})
    assert len(deserialize_forward_backward_output(result_to_sdk_protobuf(done)).loss_fn_outputs) in (0, 2)
