"""What `tinkerbus log` shows, from a real broker."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path

import pytest

from bus.codec import JSON, MSGPACK, encode
from bus.connection import Bus, connect
from bus.embedded import EmbeddedBroker
from bus.events import ModelUnloaded, OptimStepDone, UnloadModel
from bus.ledger import LedgerRow
from bus.scan import exists
from runtime.log_view import EntryLine, Line, LogView, ModelLine, NotThere, Operation, ResultLine
from runtime.service import GROUP
from tests.runtime.written_log import (
    CREATE,
    CREATE_FULL,
    PASS,
    REFUSED,
    STEP,
    answer,
    append,
    server,
    write,
)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """One for each test: positions count from 1."""
    with EmbeddedBroker(tmp_path / "broker", sync_interval="2m") as started:
        yield started


@pytest.fixture
async def bus(broker: EmbeddedBroker) -> AsyncIterator[Bus]:
    async with server(broker) as bus:
        yield bus


@pytest.fixture
async def view(bus: Bus) -> LogView:
    await write(bus)
    return await LogView.open(bus, GROUP)


def size(*ops: tuple[object, str]) -> int:
    return sum(len(encode(op, content_type)) for op, content_type in ops)  # type: ignore[arg-type]


async def take(lines: AsyncGenerator[Line, None], count: int) -> list[str]:
    """Who the next lines are of: `+` an operation, `=` a result."""
    found = []
    async with asyncio.timeout(20):
        for _ in range(count):
            line = await anext(lines)
            found.append(("+" if isinstance(line, EntryLine) else "=") + line.request_id)
    return found


# ------------------------------------------------------------------------------------------------------ models


async def test_models_are_told_with_their_place_on_the_log(view: LogView) -> None:
    ours = size((CREATE, MSGPACK), (PASS, MSGPACK), (STEP, MSGPACK), (REFUSED, MSGPACK))
    theirs = size((CREATE_FULL, JSON), (UnloadModel(), MSGPACK))
    assert await view.models() == [
        ModelLine(
            model_id="run:0",
            tenant="demo",
            status="live",
            base_model="tiny",
            first_position=1,
            last_position=5,
            entries=4,
            bytes=ours,
            last_result=3,
        ),
        ModelLine(
            model_id="b",
            tenant="other",
            status=None,
            base_model="small",
            first_position=2,
            last_position=6,
            entries=2,
            bytes=theirs,
            last_result=0,
        ),
        ModelLine(model_id="c", tenant="other", status="creating", base_model=None),
    ]


async def test_an_empty_log_says_so(bus: Bus) -> None:
    view = await LogView.open(bus, GROUP)
    with pytest.raises(NotThere, match=r"^the log is empty: no model has been created$"):
        await view.models()
    with pytest.raises(NotThere, match=r"^there is no model 'm': the log is empty$"):
        await view.operation("m", 1)


async def test_a_broker_without_streams_is_told_and_left_without(broker: EmbeddedBroker) -> None:
    async with await connect(broker.url, broker.credentials, name="test") as bus:
        with pytest.raises(NotThere, match="no stream TINKER_OPS: no tinkerbus has run on it"):
            await LogView.open(bus, GROUP)
        assert not await exists(bus, "TINKER_OPS")


async def test_looking_makes_no_table(bus: Bus) -> None:
    await append(bus, "demo", "m", 0, CREATE)
    view = await LogView.open(bus, GROUP)
    assert [line.model_id for line in await view.models()] == ["m"]
    assert (await view.operation("m", 0)).ledger is None
    for name in ("KV_tinker_models", "KV_tinker_ledger"):
        assert not await exists(bus, name)


# ------------------------------------------------------------------------------------------------- one operation


async def test_an_operation_is_shown_with_shapes_its_row_and_its_result(view: LogView) -> None:
    body = encode(PASS)
    assert await view.operation("run:0", 1) == Operation(
        request_id="run:0#1",
        model_id="run:0",
        seq_id=1,
        tenant="demo",
        position=3,
        verb="forward_backward",
        content_type="application/msgpack",
        hash=hashlib.blake2b(body, digest_size=16).hexdigest(),
        bytes=len(body),
        op={
            "type": "forward_backward",
            "data": [
                {
                    "model_input": {"dtype": "int32", "shape": [n]},
                    "loss_fn_inputs": {
                        "target_tokens": {"dtype": "int64", "shape": [n]},
                        "weights": {"dtype": "float32", "shape": [n]},
                    },
                }
                for n in (3, 2)
            ],
            "loss": {"name": "cross_entropy", "config": {}},
            "forward_only": False,
        },
        ledger=LedgerRow(body_hash="hash-1", outcome="done", position=3),
        result={
            "type": "forward_backward_done",
            "loss_fn_outputs": [{"logprobs": {"dtype": "float32", "shape": [n]}} for n in (3, 2)],
            "metrics": {"loss:sum": 4.5, "tokens:sum": 5.0, "gap:max": "inf"},
        },
    )


async def test_what_has_not_run_has_neither_row_nor_result(view: LogView) -> None:
    found = await view.operation("run:0", 2)
    assert found.op is not None
    assert found.op["adam_params"]["learning_rate"] == 1e-3
    assert (found.position, found.ledger, found.result) == (4, None, None)


async def test_a_failure_is_shown_with_its_field(view: LogView) -> None:
    found = await view.operation("run:0", 3)
    assert found.op == {
        "type": "refused",
        "error": "no such loss",
        "field": "loss.name",
        "verb": "forward_backward",
    }
    assert found.ledger == LedgerRow(body_hash="hash-3", outcome="failed", position=5, horizon=5)
    assert found.result == {
        "type": "failed",
        "error": "no such loss",
        "category": "user",
        "field": "loss.name",
    }


async def test_the_end_of_a_model_is_an_operation_too(view: LogView) -> None:
    found = await view.operation("b", None)
    assert (found.request_id, found.position, found.op) == ("b#end", 6, {"type": "unload_model"})
    assert found.result == {"type": "model_unloaded", "model_id": "b"}


async def test_a_trimmed_operation_keeps_its_row_and_its_result(bus: Bus, view: LogView) -> None:
    await bus.js.purge_stream("TINKER_OPS", seq=4)
    found = await view.operation("run:0", 1)
    assert (found.tenant, found.position, found.verb, found.op) == ("demo", None, None, None)
    assert found.ledger is not None
    assert found.result is not None


async def test_an_operation_that_cannot_be_read_is_shown_all_the_same(bus: Bus, view: LogView) -> None:
    headers = {"Content-Type": MSGPACK, "Tb-Format": "2", "Tb-Tenant": "demo", "Tb-Verb": "v", "Tb-Hash": "h"}
    await bus.js.publish("tinker.v1.ops.main.run=3A0.4", b"?", headers=headers)
    found = await view.operation("run:0", 4)
    assert found.op is not None
    assert "format 2 is newer than this reader" in found.op["error"]
    assert (found.verb, found.bytes) == ("v", 1)


@pytest.mark.parametrize(
    ("model_id", "seq_id", "says"),
    [
        ("run:1", 1, "there is no model 'run:1': did you mean 'run:0'?"),
        ("xyz", 1, "there is no model 'xyz': `tinkerbus log models` lists them"),
        ("run:0", 7, "model 'run:0' has no operation 7: its numbers go from 0 to 3"),
        ("run:0", None, "model 'run:0' has not been unloaded: its numbers go from 0 to 3"),
        ("c", 1, "model 'c' has no operation 1: it has no operations on the log"),
    ],
)
async def test_what_is_not_there_is_named(
    view: LogView, model_id: str, seq_id: int | None, says: str
) -> None:
    with pytest.raises(NotThere) as caught:
        await view.operation(model_id, seq_id)
    assert str(caught.value) == says


# --------------------------------------------------------------------------------------------------- following


async def test_from_a_position_on_every_result_follows_its_operation(bus: Bus, view: LogView) -> None:
    lines = view.follow("run:0", 1)
    assert sorted(await take(lines, 7)) == sorted(
        ["+run:0#0", "=run:0#0", "+run:0#1", "=run:0#1", "+run:0#2", "+run:0#3", "=run:0#3"]
    )
    await answer(bus, "demo", "run:0", 2, OptimStepDone(metrics={"grad_norm": 0.5}))
    assert await take(lines, 1) == ["=run:0#2"]
    await lines.aclose()


async def test_results_of_what_stands_before_the_position_are_left_out(view: LogView) -> None:
    lines = view.follow("run:0", 4)
    assert set(await take(lines, 3)) == {"+run:0#2", "+run:0#3", "=run:0#3"}
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await anext(lines)


async def test_from_now_on_only_what_is_new_comes(bus: Bus, view: LogView) -> None:
    lines = view.follow("run:0")
    first = asyncio.create_task(take(lines, 1))
    await asyncio.sleep(0.3)
    assert not first.done()
    await answer(bus, "demo", "run:0", 2, OptimStepDone(metrics={"grad_norm": 0.5}))
    assert await first == ["=run:0#2"]
    await append(bus, "other", "b", 1, STEP)
    await append(bus, "demo", "run:0", None, UnloadModel())
    assert await take(lines, 1) == ["+run:0#end"]
    await answer(bus, "demo", "run:0", None, ModelUnloaded(model_id="run:0"))
    assert await take(lines, 1) == ["=run:0#end"]
    await lines.aclose()


async def test_a_result_that_is_seen_first_waits_for_its_operation(bus: Bus, view: LogView) -> None:
    lines = view.follow("run:0")
    both = asyncio.create_task(take(lines, 2))
    await asyncio.sleep(0.2)
    await answer(bus, "demo", "run:0", 4, OptimStepDone(metrics={}))
    await asyncio.sleep(0.2)
    assert not both.done()
    await append(bus, "demo", "run:0", 4, STEP)
    assert await both == ["+run:0#4", "=run:0#4"]
    await lines.aclose()


async def test_a_line_says_what_was_asked_and_what_came_of_it(view: LogView) -> None:
    lines = view.follow("run:0", 1)
    found = [await anext(lines) for _ in range(7)]
    await lines.aclose()
    asked = {line.seq_id: line.says for line in found if isinstance(line, EntryLine)}
    assert asked == {
        0: "base_model=tiny lora_rank=4",
        1: "loss=cross_entropy datums=2 tokens=5",
        2: "learning_rate=0.001",
        3: "no such loss (field loss.name)",
    }
    came = {line.seq_id: f"{line.type}: {line.says}" for line in found if isinstance(line, ResultLine)}
    assert came == {
        0: "model_created: base_model=tiny lora_rank=4",
        1: "forward_backward_done: loss:sum=4.5 tokens:sum=5 gap:max=inf",
        3: "failed: category=user no such loss (field loss.name)",
    }


async def test_following_stops_without_a_trace(bus: Bus, view: LogView) -> None:
    before = len(bus.nc._subs)
    lines = view.follow("run:0", 1)
    await take(lines, 7)
    await lines.aclose()
    assert len(bus.nc._subs) == before
    assert bus.on_reconnect == []


async def test_following_goes_on_over_a_restart_of_the_broker(
    broker: EmbeddedBroker, bus: Bus, view: LogView
) -> None:
    lines = view.follow("run:0", 6)
    two = asyncio.create_task(take(lines, 2))
    await asyncio.sleep(0.1)
    await asyncio.to_thread(broker.restart, kill=True)
    await append(bus, "demo", "run:0", 4, STEP)
    await answer(bus, "demo", "run:0", 4, OptimStepDone(metrics={}))
    assert await two == ["+run:0#4", "=run:0#4"]
    await lines.aclose()


async def test_following_an_unknown_model_names_it(view: LogView) -> None:
    with pytest.raises(NotThere, match="there is no model 'run:9'"):
        await anext(view.follow("run:9"))
