"""Which failures take a gradient out of the window: those of a `forward_backward`, however they fail, and no others."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from actors.contract import AdapterConfig
from actors.group import MegatronGroup
from bus.blobs import BlobLost
from bus.client import datum
from bus.codec import JSON, MSGPACK, PROTOBUF, decode_submission, encode
from bus.events import ForwardBackward, LossChoice, Op, OptimStep, Refused, Submission
from bus.log import LogEntry
from bus.submit import Submitted
from bus.wire import ForwardBackwardRequest
from runtime import entries
from runtime.config import Settings
from runtime.hand_over import HandOver
from runtime.intake import entry_of
from runtime.job import Job
from runtime.sequencer import Turn

BATCH = (datum([1, 2], target_tokens=[2, 3]),)
PASS = ForwardBackward(data=BATCH, loss=LossChoice(name="cross_entropy"))
FORWARD = ForwardBackward(data=BATCH, loss=LossChoice(name="cross_entropy"), forward_only=True)


class Ranks:
    spec = None

    def clear_window(self, model_id: str) -> asyncio.Task[None]:
        return asyncio.ensure_future(asyncio.sleep(0))


async def job_of(entry: LogEntry, lost: int | None = None, *, live: bool = True, gone: bool = False) -> Job:
    """The entry's job once its turn has come; `lost`: behind this gap. `gone`: its body is."""

    async def whole(entry: LogEntry) -> LogEntry:
        if gone:
            raise BlobLost("piece 1 of 2 is not there any more")
        return entry

    hand_over = HandOver(Settings(), cast(MegatronGroup, Ranks()), whole)
    if live:
        hand_over.resume("m", AdapterConfig(rank=4, alpha=32.0, seed=0))
    read = replace(entry, position=9)
    job = Job(read, read.verb, 0.0, 0.0)
    await hand_over.begin(job, Turn(read, lost))
    return job


def sdk_body(*, forward_only: bool) -> bytes:
    message = ForwardBackwardRequest(
        model_id="m", seq_id=3, forward_only=forward_only, loss_fn="cross_entropy"
    )
    message.data.add().model_input.add().encoded_text.tokens = bytes(8)
    return bytes(message.SerializeToString())


def of_op(op: Op, content_type: str = MSGPACK) -> LogEntry:
    return entries.of_op("demo", "m", 3, op, content_type)


@pytest.mark.parametrize(
    ("entry", "loses"),
    [
        (of_op(PASS), True),
        (of_op(FORWARD), False),
        (of_op(PASS, JSON), True),
        (of_op(FORWARD, JSON), False),
        (entries.of_sdk_body("demo", "m", 3, sdk_body(forward_only=False)), True),
        (entries.of_sdk_body("demo", "m", 3, sdk_body(forward_only=True)), False),
        (of_op(OptimStep()), False),
        (of_op(Refused(error="no", verb="forward_backward")), True),
        (of_op(Refused(error="no", verb="forward")), False),
        (of_op(Refused(error="no", verb="optim_step")), False),
        (of_op(Refused(error="no")), True),
    ],
    ids=lambda given: f"{given.verb} {given.content_type}" if isinstance(given, LogEntry) else None,
)
async def test_behind_a_gap_only_what_would_have_added_a_gradient_counts_as_lost(
    entry: LogEntry, loses: bool
) -> None:
    job = await job_of(entry, lost=2)
    assert "seq_id 2 never came" in str(job.outcome)
    assert job.loses_gradient == loses


async def test_behind_a_gap_with_a_body_that_is_gone_the_gap_is_named_and_the_gradient_counts_as_lost() -> (
    None
):
    job = await job_of(of_op(FORWARD), lost=2, gone=True)
    assert "seq_id 2 never came" in str(job.outcome)
    assert job.loses_gradient


async def test_a_model_without_a_window_loses_nothing() -> None:
    job = await job_of(of_op(PASS), lost=2, live=False)
    assert not job.loses_gradient


def submitted(body: bytes, content_type: str, wrong: Any) -> Submitted:
    return Submitted("demo", "m", wrong, body, content_type, cast(Any, None))


LONG = datum([1] * 100, target_tokens=[2] * 100)


@pytest.mark.parametrize("content_type", [MSGPACK, JSON])
@pytest.mark.parametrize(("forward_only", "verb"), [(True, "forward"), (False, "forward_backward")])
def test_the_intakes_refusal_of_what_is_too_large_says_whether_a_gradient_is_lost(
    content_type: str, forward_only: bool, verb: str
) -> None:
    op = ForwardBackward(data=(LONG,), loss=PASS.loss, forward_only=forward_only)
    submission = Submission(seq_id=3, op=op)
    body = encode(submission, content_type)
    entry = entry_of(submitted(body, content_type, submission), max_datum_bytes=50)
    assert entry is not None
    refusal = entry.op()
    assert isinstance(refusal, Refused)
    assert refusal.verb == verb


@pytest.mark.parametrize(("forward_only", "verb"), [(True, "forward"), (False, "forward_backward")])
def test_so_does_that_of_an_sdk_body(forward_only: bool, verb: str) -> None:
    body = sdk_body(forward_only=forward_only)
    entry = entry_of(submitted(body, PROTOBUF, decode_submission(body, PROTOBUF)), max_datum_bytes=5)
    assert entry is not None
    refusal = entry.op()
    assert isinstance(refusal, Refused)
    assert refusal.verb == verb
