from __future__ import annotations

import json
import struct
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus import codec
from bus.codec import (
    JSON,
    MSGPACK,
    CodecError,
    NewerFormat,
    claimed_verb,
    decode_op,
    decode_result,
    decode_submission,
    encode,
)
from bus.events import (
    AdamParams,
    CreateModel,
    Datum,
    Event,
    Failed,
    ForwardBackward,
    ForwardBackwardDone,
    LoraConfig,
    LossChoice,
    ModelCreated,
    Op,
    OptimStep,
    OptimStepDone,
    Refused,
    Result,
    Submission,
    Tensor,
    UnloadModel,
)

FLOATS = st.floats(width=32, allow_nan=False)
TENSORS = st.lists(FLOATS, max_size=4).map(
    lambda xs: Tensor(dtype="float32", shape=(len(xs),), data=struct.pack(f"<{len(xs)}f", *xs))
)
TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4).map(
    lambda xs: Tensor(dtype="int32", shape=(len(xs),), data=struct.pack(f"<{len(xs)}i", *xs))
)
NAMES = st.text(min_size=1, max_size=5)
CONFIGS = st.dictionaries(
    NAMES, st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=3))
)
METRICS = st.dictionaries(NAMES, st.floats(allow_nan=False, allow_infinity=False), max_size=3)
DATUMS = st.builds(Datum, model_input=TOKENS, loss_fn_inputs=st.dictionaries(NAMES, TENSORS, max_size=2))
FORWARD_BACKWARDS = st.builds(
    ForwardBackward,
    data=st.lists(DATUMS, min_size=1, max_size=3).map(tuple),
    loss=st.builds(LossChoice, name=NAMES, config=CONFIGS),
    forward_only=st.booleans(),
)
OPS = st.one_of(
    FORWARD_BACKWARDS,
    st.builds(OptimStep, adam_params=st.builds(AdamParams, learning_rate=st.floats(0, 1))),
    st.builds(CreateModel, base_model=NAMES, lora=st.none() | st.builds(LoraConfig, rank=st.integers(1, 64))),
    st.just(UnloadModel()),
    st.builds(Refused, error=NAMES, field=st.none() | NAMES),
)
OUTCOMES = st.one_of(
    st.builds(
        ForwardBackwardDone,
        loss_fn_outputs=st.lists(st.dictionaries(NAMES, TENSORS, max_size=2), max_size=3).map(tuple),
        metrics=METRICS,
    ),
    st.builds(OptimStepDone, metrics=METRICS),
    st.builds(ModelCreated, model_id=NAMES, base_model=NAMES),
    st.builds(Failed, error=NAMES, category=st.sampled_from(["user", "server", "unknown"])),
)


@pytest.mark.parametrize("content_type", [MSGPACK, JSON])
@given(op=OPS)
def test_every_op_comes_back_as_it_was(content_type: str, op: Op) -> None:
    assert decode_op(encode(op, content_type), content_type) == op


@pytest.mark.parametrize("content_type", [MSGPACK, JSON])
@given(outcome=OUTCOMES)
def test_every_result_comes_back_as_it_was(content_type: str, outcome: object) -> None:
    result = Result(request_id="m#3", model_id="m", seq_id=3, outcome=outcome)  # type: ignore[arg-type]
    assert decode_result(encode(result, content_type), content_type) == result


def test_json_tensors_are_lists_of_numbers() -> None:
    op = ForwardBackward(
        data=(
            Datum(
                model_input=Tensor(dtype="int32", shape=(2,), data=struct.pack("<2i", 7, 8)),
                loss_fn_inputs={"weights": (0, 1.5)},
            ),
        ),
        loss=LossChoice(name="cross_entropy"),
    )
    written = json.loads(encode(Submission(seq_id=1, op=op), JSON))
    assert written["op"]["data"][0] == {
        "model_input": {"dtype": "int32", "shape": [2], "data": [7, 8]},
        "loss_fn_inputs": {"weights": [0, 1.5]},
    }


def test_json_says_infinite_logprobs_in_base64() -> None:
    tensor = Tensor(dtype="float32", shape=(1,), data=struct.pack("<f", float("-inf")))
    done = ForwardBackwardDone(loss_fn_outputs=({"logprobs": tensor},), metrics={})
    result = Result(request_id="m#1", model_id="m", seq_id=1, outcome=done)
    assert decode_result(encode(result, JSON), JSON) == result


def test_json_refuses_a_metric_it_cannot_say() -> None:
    done = OptimStepDone(metrics={"grad_norm:max": float("inf")})
    with pytest.raises(CodecError, match="grad_norm:max is inf") as caught:
        encode(Result(request_id="m#1", model_id="m", seq_id=1, outcome=done), JSON)
    assert caught.value.field == "metrics.grad_norm:max"


def test_a_hand_written_json_submission_is_understood() -> None:
    body = b"""{"seq_id": 4, "op": {"type": "forward_backward", "loss": {"name": "ppo", "config": {"beta": 1}},
        "data": [{"model_input": [1, 2], "loss_fn_inputs": {"weights": {"dtype": "float32", "shape": [2],
        "data": [0, 1.5]}}}]}}"""
    submission = decode_submission(body, JSON)
    assert isinstance(submission.op, ForwardBackward)
    assert submission.op.loss.config == {"beta": 1.0}
    assert submission.op.data[0].model_input == (1, 2)
    assert submission.op.data[0].loss_fn_inputs["weights"] == Tensor(
        dtype="float32", shape=(2,), data=struct.pack("<2f", 0, 1.5)
    )


@pytest.mark.parametrize(
    ("body", "field", "seq_id"),
    [
        (b'{"seq_id":3,"op":{"type":"optim_step","adam_params":{"lr":1}}}', "adam_params.lr", 3),
        (b'{"seq_id":3,"op":{"type":"optim_step","adam_params":{"beta1":"x"}}}', "adam_params.beta1", 3),
        (b'{"seq_id":3}', "op", 3),
        (b'{"seq_id":3,"op":{"type":"dance"}}', "type", 3),
        (b'{"op":{"type":"optim_step"}}', "seq_id", None),
        (b'{"seq_id":null,"op":{"type":"optim_step"}}', "seq_id", None),
        (b'{"seq_id":0,"op":{"type":"optim_step"}}', "seq_id", 0),
        (b'{"seq_id":-1,"op":{"type":"optim_step"}}', "seq_id", None),
        (b'{"seq_id":9223372036854775808,"op":{"type":"optim_step"}}', "seq_id", None),
        (b'{"seq_id":1,"op":{"type":"create_model","base_model":"tiny"}}', "seq_id", 1),
        (b'{"seq_id":5,"op":{"type":"unload_model"}}', "seq_id", 5),
        (b'{"seq_id":5,"op":{"type":"refused","error":"x"}}', "type", 5),
        (b'{"seq_id":5,"op":{"type":"optim_step"},"extra":1}', "extra", 5),
        (
            b'{"seq_id":2,"op":{"type":"forward_backward","loss":{"name":"x"},"data":'
            b'[{"model_input":["a"],"loss_fn_inputs":{}}]}}',
            "data[0].model_input[0]",
            2,
        ),
        (
            b'{"seq_id":2,"op":{"type":"forward_backward","loss":{"name":"x"},"data":[{"model_input":[1],'
            b'"loss_fn_inputs":{"weights":{"dtype":"float32","shape":[2],"data":[1]}}}]}}',
            "data[0].loss_fn_inputs.weights",
            2,
        ),
        (b"\xff\xfe nothing", None, None),
        (b"", None, None),
        (b"[" * 100_000, None, None),
    ],
)
def test_what_is_wrong_is_named_and_the_number_kept(
    body: bytes, field: str | None, seq_id: int | None
) -> None:
    with pytest.raises(CodecError) as caught:
        decode_submission(body, JSON)
    assert caught.value.field == field
    assert caught.value.seq_id == seq_id
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=60))
def test_no_bytes_at_all_raise_anything_but_a_codec_error(body: bytes) -> None:
    for content_type in (MSGPACK, JSON, codec.PROTOBUF):
        try:
            decode_submission(body, content_type)
        except CodecError:
            continue


@pytest.mark.parametrize(
    ("body", "verb"),
    [
        (b'{"op":{"type":"optim_step","adam_params":{"lr":1}}}', "optim_step"),
        (b'{"op":{"type":"forward_backward","data":[{"model_input":["a"]}]}}', "forward_backward"),
        (b'{"op":{"type":"forward_backward","data":5,"forward_only":true}}', "forward"),
        (b'{"op":{"type":"forward_backward","forward_only":"yes"}}', None),
        (b'{"op":{"type":"refused","error":"x"}}', None),
        (b'{"op":{"type":"dance"}}', None),
        (b'{"seq_id":3}', None),
        (b"\xff\xfe nothing", None),
    ],
)
def test_what_cannot_be_understood_may_still_say_which_operation_it_is(body: bytes, verb: str | None) -> None:
    assert claimed_verb(body, JSON) == verb


@given(st.binary(max_size=60))
def test_whatever_the_bytes_no_error_comes_of_asking(body: bytes) -> None:
    for content_type in (MSGPACK, JSON, codec.PROTOBUF, "text/plain"):
        claimed_verb(body, content_type)


def test_a_newer_format_is_refused_by_name_even_with_unknown_fields() -> None:
    for content_type, module in ((MSGPACK, msgspec.msgpack), (JSON, msgspec.json)):
        body = module.encode({"format": 2, "seq_id": 4, "op": {"type": "teleport"}, "where": "far"})
        with pytest.raises(NewerFormat, match="format 2 is newer") as caught:
            decode_submission(body, content_type)
        assert caught.value.seq_id == 4
        result = Result(request_id="m#1", model_id="m", seq_id=1, outcome=OptimStepDone(metrics={}), format=2)
        with pytest.raises(NewerFormat):
            decode_result(module.encode(result), content_type)
    with pytest.raises(NewerFormat):
        decode_op(encode(OptimStep()), MSGPACK, format_number=2)


def test_an_unknown_content_type_is_named() -> None:
    with pytest.raises(CodecError, match="'text/plain' cannot be read"):
        decode_op(b"", "text/plain")
    with pytest.raises(CodecError, match="'text/plain' cannot be written"):
        encode(OptimStep(), "text/plain")


def test_a_batch_of_64_datums_of_1024_tokens_decodes_in_milliseconds() -> None:
    def tensor(dtype: str, size: int) -> Tensor:
        return Tensor(dtype=dtype, shape=(1024,), data=bytes(1024 * size))  # type: ignore[arg-type]

    one = Datum(
        model_input=tensor("int32", 4),
        loss_fn_inputs={
            "target_tokens": tensor("int64", 8),
            "logprobs": tensor("float32", 4),
            "advantages": tensor("float32", 4),
        },
    )
    event: Event = ForwardBackward(data=(one,) * 64, loss=LossChoice(name="ppo"))
    body = encode(event)
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        decode_op(body, MSGPACK)
        taken.append(time.perf_counter() - start)
    assert min(taken) < 0.005  # as lists of numbers it would be above 0.012
