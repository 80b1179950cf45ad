"""What the intake writes onto the log for a submission: its content type, its size and its identity."""

from __future__ import annotations

from typing import Any

import pytest

from bus.client import datum
from bus.codec import JSON, MSGPACK
from bus.events import Failed, ForwardBackward, LossChoice, OptimStepDone, Outcome, Refused
from bus.log import LogEntry
from bus.wire import ForwardBackwardRequest
from runtime import entries, settling
from runtime.ingress import training

OP = ForwardBackward(
    data=(datum([1, 2], target_tokens=[2, 3], weights=[0.1, 1]),), loss=LossChoice(name="cross_entropy")
)


def entry(content_type: str) -> LogEntry:
    return entries.of_op("demo", "m", 1, OP, content_type)


@pytest.mark.parametrize("content_type", [MSGPACK, JSON])
def test_an_operation_keeps_its_content_type_and_reads_as_it_was_sent(content_type: str) -> None:
    assert entry(content_type).content_type == content_type
    assert entry(content_type).op() == OP


def test_the_same_operation_has_one_identity_in_both_content_types() -> None:
    assert entry(JSON).body_hash == entry(MSGPACK).body_hash
    assert entry(JSON).body != entry(MSGPACK).body


def test_a_refusal_answers_in_the_senders_content_type() -> None:
    refusal = entries.of_refusal("demo", "m", 1, "no", "seq_id", b"{}", JSON)
    assert (refusal.content_type, refusal.op()) == (JSON, Refused(error="no", field="seq_id"))


def test_a_datum_above_the_limit_is_named_with_both_sizes() -> None:
    wrong = entries.too_large([5, 100, 101, 200], 100)
    assert wrong is not None
    assert (wrong.field, str(wrong)) == (
        "data[2]",
        "data[2] has 101 bytes; the limit is 100 (limits.max_datum_bytes)",
    )
    assert entries.too_large([5, 100], 100) is None
    assert entries.too_large([10**9], 0) is None


@pytest.mark.parametrize(("forward_only", "verb"), [(True, "forward"), (False, "forward_backward")])
def test_the_refusal_of_what_is_too_large_says_whether_a_gradient_is_lost(
    forward_only: bool, verb: str
) -> None:
    message = ForwardBackwardRequest(model_id="m", seq_id=1, forward_only=forward_only)
    message.data.add().model_input.add().encoded_text.tokens = bytes(40)
    refusal = training._entry("demo", message.SerializeToString(), max_datum_bytes=20).op()
    assert isinstance(refusal, Refused)
    assert refusal.verb == verb


@pytest.mark.parametrize(
    ("content_type", "outcome", "answer"),
    [
        (JSON, OptimStepDone(metrics={"grad_norm": 1.0}), JSON),
        (JSON, OptimStepDone(metrics={"grad_norm": float("inf")}), MSGPACK),
        (JSON, Failed(error="no", category="user"), JSON),
        (MSGPACK, OptimStepDone(metrics={"grad_norm": 1.0}), MSGPACK),
    ],
)
def test_json_is_answered_in_json_unless_a_metric_has_no_word_in_it(
    content_type: str, outcome: Outcome, answer: Any
) -> None:
    assert settling._answered_in(entry(content_type), outcome) == answer
