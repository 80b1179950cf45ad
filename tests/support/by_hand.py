"""Operations sent by hand, each as often as a test likes, over HTTP in the SDK's own bodies and over NATS."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import uuid4

import httpx
import msgspec
import torch
from tinker.proto import tinker_public_pb2

from bus import codec, subjects
from bus.connection import Bus
from bus.events import (
    CreateModel,
    Datum,
    Failed,
    ForwardBackward,
    ForwardBackwardDone,
    LossChoice,
    Op,
    OptimStep,
    OptimStepDone,
    Submission,
    Tensor,
    UnloadModel,
)
from bus.log import body_hash
from bus.results import Results
from tests.support import sdk
from tests.support.requests import datums

DTYPES = {"float32": tinker_public_pb2.DTYPE_FLOAT32, "int64": tinker_public_pb2.DTYPE_INT64}


@dataclass(frozen=True)
class Answer:
    """The one answer to an operation; equal to another one where every bit is."""

    request_id: str
    body: bytes
    metrics: dict[str, float]
    error: str | None = None


class Refused(Exception):
    """The server did not take the request."""


class Sender(Protocol):
    """One way to a service."""

    says_so: bool
    """Whether a request that is not taken raises Refused; else it is the number's own answer that comes back."""

    async def new_model(self) -> str:
        """The id of a model that is still to be created."""
        ...

    async def ask(self, model_id: str, seq_id: int | None, op: Op) -> Answer:
        """Send the operation, and wait for its answer."""
        ...


def batch(lengths: tuple[int, ...], seed: int, *, forward_only: bool = False) -> ForwardBackward:
    tokens, inputs = datums(lengths, seed=seed)
    return ForwardBackward(
        data=tuple(sdk.bus_datum(t, i.tensors) for t, i in zip(tokens, inputs, strict=True)),
        loss=LossChoice(name="cross_entropy"),
        forward_only=forward_only,
    )


class OverHttp:
    says_so = True

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def new_model(self) -> str:
        answer = await self._post("create_session", {"type": "create_session"})
        return f"{answer.json()['session_id']}:train:0"

    async def ask(self, model_id: str, seq_id: int | None, op: Op) -> Answer:
        path, body = _http(model_id, seq_id, op)
        accepted = (await self._post(path, body)).json()
        assert accepted["model_id"] == model_id
        while True:
            found = await self._post("retrieve_future", {"request_id": accepted["request_id"]})
            if found.status_code != 408:
                return _http_answer(accepted["request_id"], found)

    async def _post(self, path: str, body: dict[str, Any] | bytes) -> httpx.Response:
        kind = codec.PROTOBUF if isinstance(body, bytes) else codec.JSON
        content = body if isinstance(body, bytes) else json.dumps(body)
        answer = await self._client.post(
            f"/api/v1/{path}", content=content, headers={"content-type": kind}, timeout=120
        )
        if answer.status_code == 400:
            raise Refused(answer.json()["detail"])
        assert answer.status_code in (200, 408), answer.text
        return answer


def _http(model_id: str, seq_id: int | None, op: Op) -> tuple[str, dict[str, Any] | bytes]:
    """Endpoint and body."""
    match op:
        case CreateModel(lora=lora):
            session_id, _, number = model_id.rpartition(":train:")
            return "create_model", {
                "session_id": session_id,
                "model_seq_id": int(number),
                "base_model": op.base_model,
                "lora_config": msgspec.to_builtins(lora),
            }
        case ForwardBackward():
            assert seq_id is not None
            return "forward_backward", _protobuf(model_id, seq_id, op)
        case OptimStep(adam_params=adam):
            return "optim_step", {
                "model_id": model_id,
                "seq_id": seq_id,
                "adam_params": msgspec.to_builtins(adam),
            }
        case UnloadModel():
            return "unload_model", {"model_id": model_id}
        case _:
            raise TypeError(op)


def _protobuf(model_id: str, seq_id: int, op: ForwardBackward) -> bytes:
    request = tinker_public_pb2.ForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id, loss_fn=op.loss.name, forward_only=op.forward_only
    )
    for datum in op.data:
        _add(request.data.add(), datum)
    body: bytes = request.SerializeToString(deterministic=True)
    return body


def _add(message: Any, datum: Datum) -> None:
    tokens = datum.model_input
    assert isinstance(tokens, Tensor)
    assert isinstance(tokens.data, bytes)
    of_64_bit = torch.frombuffer(bytearray(tokens.data), dtype=torch.int64)
    message.model_input.add().encoded_text.tokens = of_64_bit.to(torch.int32).numpy().tobytes()
    for name, values in datum.loss_fn_inputs.items():
        assert isinstance(values, Tensor)
        field = message.loss_fn_inputs[name]
        field.dense, field.dtype = values.data, DTYPES[values.dtype]
        field.shape.extend(values.shape)


def _http_answer(request_id: str, found: httpx.Response) -> Answer:
    if found.headers["content-type"] == codec.PROTOBUF:
        output = tinker_public_pb2.ForwardBackwardOutput.FromString(found.content)
        # A map's entries have no order on the wire.
        return Answer(request_id, output.SerializeToString(deterministic=True), dict(output.metrics))
    content = found.json()
    return Answer(request_id, found.content, content.get("metrics", {}), content.get("error"))


class OverNats:
    """`bus` is a tenant's connection."""

    says_so = False

    def __init__(self, bus: Bus, tenant: str, *, message_ids: bool = False) -> None:
        """`message_ids`: send the header by which the broker itself leaves out copies inside its dedupe window."""
        self._bus = bus
        self._tenant = tenant
        self._results = Results(bus, tenant)
        self._message_ids = message_ids
        self.left_out = 0
        """Copies that the broker did not store."""

    async def new_model(self) -> str:
        return f"by-hand-{uuid4().hex[:8]}"

    async def ask(self, model_id: str, seq_id: int | None, op: Op) -> Answer:
        headers = {"Content-Type": codec.MSGPACK, "Tb-Format": "1"}
        body = codec.encode(Submission(seq_id=seq_id, op=op))
        if self._message_ids:
            headers["Nats-Msg-Id"] = f"{model_id} {body_hash(body, codec.MSGPACK)}"
        stored = await self._bus.request(
            subjects.submit(self._tenant, model_id), body, headers=headers, timeout_s=30
        )
        acknowledgement = json.loads(stored.data)
        assert "error" not in acknowledgement, acknowledgement
        self.left_out += acknowledgement.get("duplicate", False)
        found = await self._results.wait(self._tenant, model_id, seq_id, 120)
        assert found is not None, (model_id, seq_id)
        result = found.result()
        outcome = result.outcome
        metrics = outcome.metrics if isinstance(outcome, ForwardBackwardDone | OptimStepDone) else {}
        error = outcome.error if isinstance(outcome, Failed) else None
        return Answer(result.request_id, found.body, metrics, error)

    async def close(self) -> None:
        await self._results.close()


class Sent:
    """One model, and every operation that it was sent, with its answer."""

    def __init__(self, sender: Sender, model_id: str) -> None:
        self.sender = sender
        self.model_id = model_id
        self.answers: dict[int | None, tuple[Op, Answer]] = {}

    @property
    def next_seq_id(self) -> int:
        return sum(seq_id is not None for seq_id in self.answers)

    async def send(self, op: Op, copies: int = 1) -> Answer:
        """Under the next number, all copies at once."""
        seq_id = None if isinstance(op, UnloadModel) else self.next_seq_id
        answers = await asyncio.gather(*(self.sender.ask(self.model_id, seq_id, op) for _ in range(copies)))
        assert answers[0].error is None, answers[0].error
        assert all(answer == answers[0] for answer in answers), (self.model_id, seq_id, op.__class__)
        self.answers[seq_id] = op, answers[0]
        return answers[0]

    async def send_all_again(self) -> None:
        """Every operation: the same request id and, bit for bit, the same result."""
        answers = await asyncio.gather(
            *(self.sender.ask(self.model_id, seq_id, op) for seq_id, (op, _) in self.answers.items())
        )
        for again, (seq_id, (op, first)) in zip(answers, self.answers.items(), strict=True):
            assert again == first, (self.model_id, seq_id, op.__class__)
