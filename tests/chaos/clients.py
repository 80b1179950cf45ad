"""The tenants at work, each in a thread: the unmodified SDK, and the library for event clients.

What a service in trouble asks of a client is the SDK's own retries, and of an event client `resend` where the broker
did not say whether it has an operation. Nothing else is caught: whatever is raised fails the run.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections import deque
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tinker import types

from bus.client import Client, LoraConfig, Model, Unconfirmed, connect
from bus.events import ForwardBackwardDone
from tests.chaos.plan import AHEAD, APART, Step, Tenant, steps
from tests.support import sdk
from tests.support.service import Service

T = TypeVar("T")

Record = dict[str, Any]
"""What a client was told of one operation: its metrics, and a digest of its logprobs."""


@dataclass(frozen=True, slots=True)
class Received:
    """A result, as it came to a client."""

    at: float
    seq_id: int
    """Of the operation's last request."""


@dataclass
class Progress:
    """How far all tenants are; shared by their threads and the one that watches them."""

    steps: dict[str, int] = field(default_factory=dict)
    received: dict[str, list[Received]] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    given_up: bool = False

    def note(self, tenant: str, seq_id: int, *, step: bool) -> None:
        with self.changed:
            self.received.setdefault(tenant, []).append(Received(time.monotonic(), seq_id))
            if step:
                self.steps[tenant] = self.steps.get(tenant, 0) + 1
            self.changed.notify_all()

    def total(self) -> int:
        return sum(self.steps.values())

    def wait_for_others(self, number: int) -> None:
        """Until everybody has had all but `APART` of the steps before `number`."""
        with self.changed:
            self.changed.wait_for(lambda: self.given_up or number - min(self.steps.values()) <= APART)
            if self.given_up:
                raise RuntimeError("the run was given up")

    def end(self) -> None:
        with self.changed:
            self.given_up = True
            self.changed.notify_all()


class Worker:
    """One tenant: makes its model when it is built, and trains it once started."""

    def __init__(self, tenant: Tenant, service: Service, count: int, progress: Progress) -> None:
        self.tenant = tenant
        self.model_id = ""
        self.records: list[Record] = []
        self.requests = 0
        """Numbers of the model's sequence used so far, its creation left out."""
        self.error: BaseException | None = None
        self._service = service
        self._progress = progress
        self._steps = steps(tenant, count)
        self._created = threading.Event()
        self._go = threading.Event()
        progress.steps[tenant.name] = 0
        progress.received[tenant.name] = []
        self.thread = threading.Thread(target=self._run, name=tenant.name, daemon=True)
        self.thread.start()

    def wait_until_created(self, within_s: float) -> None:
        if not self._created.wait(within_s) or self.error is not None:
            raise RuntimeError(f"{self.tenant.name} has no model: {self.error!r}")

    def begin(self) -> None:
        self._go.set()

    def _run(self) -> None:
        try:
            if self.tenant.over == "sdk":
                self._over_http()
            else:
                asyncio.run(self._over_nats())
        except BaseException as error:
            self.error = error
        finally:
            self._created.set()
            with self._progress.changed:
                self._progress.changed.notify_all()

    def _take(self, seq_id: int, record: Record, *, step: bool) -> None:
        self.records.append(record)
        self._progress.note(self.tenant.name, seq_id, step=step)

    # ------------------------------------------------------------------------------------------------- HTTP

    def _over_http(self) -> None:
        client = sdk.training_client(self._service, rank=self.tenant.rank, seed=self.tenant.seed)
        self.model_id = sdk.model_id(client)
        self._created.set()
        self._go.wait()
        adam = types.AdamParams(learning_rate=self.tenant.learning_rate)
        waiting: deque[list[tuple[int, Any]]] = deque()
        for number, step in enumerate(self._steps):
            self._progress.wait_for_others(number)
            sent: list[tuple[int, Any]] = []
            for call in range(len(step.calls)):
                tokens, inputs = step.batch(self.tenant.loss, call)
                batch = [sdk.sdk_datum(t, i.tensors) for t, i in zip(tokens, inputs, strict=True)]
                sent.append(
                    (self._number(step, call), client.forward_backward(batch, self.tenant.loss))  # type: ignore[arg-type]
                )
            self.requests += 1
            sent.append((self.requests, client.optim_step(adam)))
            waiting.append(sent)
            if len(waiting) > AHEAD:
                self._collect(waiting.popleft())
        while waiting:
            self._collect(waiting.popleft())
        client.holder.close()  # else its heartbeats go on for ever

    def _collect(self, sent: list[tuple[int, Any]]) -> None:
        for seq_id, future in sent:
            result = future.result()
            if isinstance(result, types.OptimStepResponse):
                self._take(seq_id, {"step": dict(result.metrics or {})}, step=True)
            else:
                logprobs = (tensor.numpy().astype("<f4").tobytes() for tensor in sdk.logprobs(result))
                self._take(seq_id, _scored(result.metrics, logprobs), step=False)

    # ------------------------------------------------------------------------------------------------- NATS

    async def _over_nats(self) -> None:
        password = self._service.nats_password
        async with await connect(self._service.nats, tenant="default", password=password) as client:
            model = await self._create(client)
            self.model_id = model.model_id
            self._created.set()
            await asyncio.to_thread(self._go.wait)
            waiting: deque[list[tuple[int, Any]]] = deque()
            for number, step in enumerate(self._steps):
                await asyncio.to_thread(self._progress.wait_for_others, number)
                waiting.append(await self._send(model, step))
                if len(waiting) > AHEAD:
                    await self._collect_events(waiting.popleft())
            while waiting:
                await self._collect_events(waiting.popleft())

    async def _create(self, client: Client) -> Model:
        lora = LoraConfig(rank=self.tenant.rank, seed=self.tenant.seed)
        return await client.create_model(f"chaos:{self.tenant.name}", base_model="tiny", lora=lora)

    async def _send(self, model: Model, step: Step) -> list[tuple[int, Any]]:
        sent: list[tuple[int, Any]] = []
        for call in range(len(step.calls)):
            tokens, inputs = step.batch(self.tenant.loss, call)
            batch = [sdk.bus_datum(t, i.tensors) for t, i in zip(tokens, inputs, strict=True)]
            pending = await _confirmed(model, model.forward_backward(batch, loss=self.tenant.loss))
            sent.append((self._number(step, call), pending))
        stepped = model.optim_step(learning_rate=self.tenant.learning_rate)
        pending_step = await _confirmed(model, stepped)
        self.requests += 1
        sent.append((self.requests, pending_step))
        return sent

    async def _collect_events(self, sent: list[tuple[int, Any]]) -> None:
        for seq_id, pending in sent:
            result = await pending
            if isinstance(result, ForwardBackwardDone):
                logprobs = (bytes(output["logprobs"].data) for output in result.loss_fn_outputs)
                self._take(seq_id, _scored(result.metrics, logprobs), step=False)
            else:
                self._take(seq_id, {"step": dict(result.metrics)}, step=True)

    def _number(self, step: Step, call: int) -> int:
        self.requests += step.requests(self.tenant, call)
        return self.requests


async def _confirmed(model: Model, sending: Awaitable[T]) -> T:
    """An operation that the broker certainly has, however long it was away."""
    try:
        return await sending
    except Unconfirmed:
        while True:
            try:
                sent: Any = await model.resend()
            except Unconfirmed:
                continue
            return sent  # type: ignore[no-any-return]


def _scored(metrics: dict[str, float], logprobs: Iterable[bytes]) -> Record:
    digest = hashlib.sha256()
    for values in logprobs:
        digest.update(len(values).to_bytes(8, "little") + values)
    return {"metrics": dict(metrics), "logprobs": digest.hexdigest()}
