"""The library for event clients: training over the bus, from any process that can reach the broker.

    async with await connect("nats://127.0.0.1:4222", tenant="demo", password="…") as client:
        model = await client.create_model("my-model", base_model="tiny", lora=LoraConfig(rank=8))
        pending = await model.forward_backward(data, loss="cross_entropy")
        step = await model.optim_step(learning_rate=1e-3)
        done = await pending
        await step
        await model.unload()

An operation call returns when the broker has stored the operation; what it returns is awaited for the result. So a
loop may send many operations ahead. A model has one writer at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

from bus.connection import BrokerUnreachable, Bus, Credentials
from bus.connection import connect as connect_bus
from bus.datum import datum
from bus.events import (
    AdamParams,
    Checkpoint,
    CreateModel,
    Datum,
    Failed,
    ForwardBackward,
    ForwardBackwardDone,
    LoadWeights,
    LoraConfig,
    LossChoice,
    ModelCreated,
    ModelUnloaded,
    Op,
    OptimStep,
    OptimStepDone,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
    Submission,
    UnloadModel,
    WeightsLoaded,
    WeightsSaved,
    request_id,
)
from bus.results import Results
from bus.submit import QueueFull, Submitter

__all__ = [
    "AdamParams",
    "Checkpoint",
    "Client",
    "LoraConfig",
    "Model",
    "OperationFailed",
    "Pending",
    "QueueFull",
    "Unconfirmed",
    "connect",
    "datum",
]

R = TypeVar(
    "R",
    ModelCreated,
    ForwardBackwardDone,
    OptimStepDone,
    WeightsSaved,
    WeightsLoaded,
    ModelUnloaded,
)


class OperationFailed(Exception):
    """The server refused or could not finish an operation; its number is used up."""

    def __init__(self, operation: str, failed: Failed) -> None:
        where = f" (field {failed.field})" if failed.field else ""
        super().__init__(f"{operation} failed, category {failed.category}: {failed.error}{where}")
        self.error = failed.error
        self.category = failed.category
        """"user": the request was wrong. "server": try again. "unknown"."""
        self.field = failed.field
        self.request_id = operation


class Unconfirmed(BrokerUnreachable):
    """The broker did not say whether it stored an operation. `Model.resend` settles it."""


async def connect(url: str, *, tenant: str, password: str, name: str | None = None) -> Client:
    """Connect as a tenant. Raises BrokerUnreachable, BrokerTooOld, NoJetStream, WrongCredentials."""
    credentials = Credentials(tenant, password)
    bus = await connect_bus(url, credentials, name=name or f"client-{tenant}", uses_jetstream=False)
    return Client(bus, tenant)


class Client:
    """One tenant's connection. Made by `connect`."""

    def __init__(self, bus: Bus, tenant: str) -> None:
        self.tenant = tenant
        self._bus = bus
        self._submitter = Submitter(bus, tenant)
        self._results = Results(bus, tenant)

    async def create_model(
        self,
        model_id: str,
        *,
        base_model: str = "",
        lora: LoraConfig | None = None,
        user_metadata: Mapping[str, str] | None = None,
        start: Checkpoint | None = None,
    ) -> Model:
        """A new model, ready to train. `lora=None` asks for full-parameter training. Raises OperationFailed.

        With `start` it begins as that checkpoint, with its configuration: `base_model` and `lora` may be left out.
        """
        model = Model(self, model_id, next_seq_id=0)
        op = CreateModel(
            base_model=base_model, lora=lora, user_metadata=dict(user_metadata or {}), start=start
        )
        await (await model._send(op, ModelCreated))
        return model

    def attach(self, model_id: str, next_seq_id: int) -> Model:
        """A model that exists, to be continued at `next_seq_id`."""
        return Model(self, model_id, next_seq_id=next_seq_id)

    async def close(self) -> None:
        await self._results.close()
        await self._bus.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class Model:
    """One model of this tenant. Numbers its operations in the order in which the calls were made."""

    def __init__(self, client: Client, model_id: str, *, next_seq_id: int) -> None:
        self._client = client
        self.model_id = model_id
        self.next_seq_id = next_seq_id
        self.submit_timeout_s = 60.0
        """How long an operation waits for room in the queue, or for an absent broker."""
        self._one_at_a_time = asyncio.Lock()
        self._unconfirmed: tuple[Submission, type[Any]] | None = None

    async def forward_backward(
        self,
        data: Sequence[Datum],
        loss: str = "cross_entropy",
        config: Mapping[str, float | str] | None = None,
        *,
        forward_only: bool = False,
    ) -> Pending[ForwardBackwardDone]:
        """Add the gradient of one batch to the window; `forward_only` scores it and leaves the window alone."""
        choice = LossChoice(name=loss, config=dict(config or {}))
        op = ForwardBackward(data=tuple(data), loss=choice, forward_only=forward_only)
        return await self._send(op, ForwardBackwardDone)

    async def optim_step(
        self, adam_params: AdamParams | None = None, **fields: float
    ) -> Pending[OptimStepDone]:
        """Step AdamW on the window. `fields` are those of `AdamParams`, and the defaults its."""
        if adam_params is not None and fields:
            raise TypeError("give adam_params or its fields, not both")
        return await self._send(OptimStep(adam_params=adam_params or AdamParams(**fields)), OptimStepDone)

    async def save_weights(
        self,
        name: str,
        *,
        overwrite: bool = False,
        ttl_seconds: int | None = None,
        user_metadata: Mapping[str, str] | None = None,
    ) -> Pending[WeightsSaved]:
        """Save weights, optimizer and counters as they are after everything sent before; training goes on meanwhile."""
        op = SaveWeights(
            name=name,
            overwrite=overwrite,
            ttl_seconds=ttl_seconds,
            user_metadata=dict(user_metadata or {}),
        )
        return await self._send(op, WeightsSaved)

    async def save_weights_for_sampler(
        self, name: str, *, ttl_seconds: int | None = None, user_metadata: Mapping[str, str] | None = None
    ) -> Pending[WeightsSaved]:
        """Save weights to sample from."""
        op = SaveWeightsForSampler(
            name=name, ttl_seconds=ttl_seconds, user_metadata=dict(user_metadata or {})
        )
        return await self._send(op, WeightsSaved)

    async def save_weights_external(
        self, name: str, *, ttl_seconds: int | None = None
    ) -> Pending[WeightsSaved]:
        """Save weights for other programs: a PEFT folder, or a Hugging Face one of a model that trains whole."""
        return await self._send(SaveWeightsExternal(name=name, ttl_seconds=ttl_seconds), WeightsSaved)

    async def load_weights(self, path: str, *, optimizer: bool = False) -> Pending[WeightsLoaded]:
        """Go on from `tinker://<model_id>/weights/<name>`, with its optimizer state or a fresh one."""
        op = LoadWeights(checkpoint=Checkpoint(path=path, optimizer=optimizer))
        return await self._send(op, WeightsLoaded)

    async def unload(self) -> ModelUnloaded:
        """End the model once everything sent before has run."""
        return await (await self._send(UnloadModel(), ModelUnloaded))

    async def resend(self) -> Pending[Any]:
        """After `Unconfirmed`: submit that operation again, which is harmless if it was stored."""
        async with self._one_at_a_time:
            if self._unconfirmed is None:
                raise ValueError(f"no operation of model {self.model_id!r} is unconfirmed")
            return await self._submit(*self._unconfirmed)

    async def _send(self, op: Op, result_type: type[R]) -> Pending[R]:
        async with self._one_at_a_time:
            if self._unconfirmed is not None:
                raise Unconfirmed(
                    f"operation {self.next_seq_id} of model {self.model_id!r} may or may not be stored: "
                    "call resend() before anything else"
                )
            seq_id = None if isinstance(op, UnloadModel) else self.next_seq_id
            return await self._submit(Submission(seq_id=seq_id, op=op), result_type)

    async def _submit(self, submission: Submission, result_type: type[R]) -> Pending[R]:
        deadline = time.monotonic() + self.submit_timeout_s
        pause_s = 0.05
        while True:
            left = max(1.0, deadline - time.monotonic())  # a full queue is worth a whole question
            self._unconfirmed = (submission, result_type)
            try:
                await self._client._submitter.submit(self.model_id, submission, timeout_s=left)
                break
            except BrokerUnreachable as error:
                raise Unconfirmed(f"{error}; the operation may or may not be stored: call resend()") from None
            except QueueFull:
                self._unconfirmed = None
                if time.monotonic() + pause_s > deadline:
                    raise
            except Exception:
                self._unconfirmed = None
                raise
            await asyncio.sleep(pause_s)
            pause_s = min(2.0, 2 * pause_s)
        self._unconfirmed = None
        if submission.seq_id is not None:
            self.next_seq_id = submission.seq_id + 1
        return Pending(self._client, self.model_id, submission.seq_id, result_type)


class Pending(Generic[R]):
    """An operation on its way. Await it, as often as you like, for its result; raises OperationFailed."""

    def __init__(self, client: Client, model_id: str, seq_id: int | None, result_type: type[R]) -> None:
        self._client = client
        self.model_id = model_id
        self.seq_id = seq_id
        self._result_type: type[Any] = result_type

    @property
    def request_id(self) -> str:
        return request_id(self.model_id, self.seq_id)

    async def result(self, timeout_s: float | None = None) -> R:
        """The result. Raises OperationFailed, and TimeoutError after `timeout_s`; the operation still runs then.

        Results stay readable for a day, unless the server is configured otherwise.
        """
        stored = await self._client._results.wait(self._client.tenant, self.model_id, self.seq_id, timeout_s)
        if stored is None:
            raise TimeoutError(f"no result of {self.request_id} within {timeout_s} s")
        outcome = stored.result().outcome
        if isinstance(outcome, Failed):
            raise OperationFailed(self.request_id, outcome)
        if not isinstance(outcome, self._result_type):
            raise TypeError(
                f"{self.request_id} has a {type(outcome).__name__}, not a {self._result_type.__name__}: "
                "another writer used this number"
            )
        return cast(R, outcome)

    def __await__(self) -> Generator[Any, None, R]:
        return self.result().__await__()
