"""A Tinker-compatible server as its clients see it: sessions, models, and what calls give back."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import tinker
from tinker import types

from runtime.gates.data import Array

WAIT_S = 120.0
"""For one answer; a server that takes longer fails the gate that asked."""
CONNECT_S = 10.0
RANK = 8
SEED = 3

Config = Mapping[str, float | str]
_NORM = re.compile(r"(^|[^a-z])(grad|gradient)_norm([^a-z]|$)")


class Unreachable(Exception):
    """There is no Tinker-compatible server that lets us in. `str()` is made for whoever named it."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What one `forward` or `forward_backward` gave back."""

    logprobs: list[Array]
    """float32, one a datum, shaped like its targets."""
    metrics: dict[str, float]

    @property
    def loss(self) -> float:
        return self.metrics["loss:sum"]


def grad_norm(metrics: Mapping[str, float]) -> float | None:
    """The gradient norm among a step's metrics, whose names no document gives; None where there is none."""
    return next((value for name, value in metrics.items() if _NORM.search(name)), None)


class Model:
    """One model under training. Every method waits for its answer."""

    def __init__(self, client: tinker.TrainingClient) -> None:
        self.client = client

    @property
    def id(self) -> str:
        return str(self.client.model_id)

    def forward(
        self, data: Sequence[types.Datum], loss: str = "cross_entropy", config: Config | None = None
    ) -> Scored:
        return scored(self.client.forward(list(data), loss, config))

    def forward_backward(
        self, data: Sequence[types.Datum], loss: str = "cross_entropy", config: Config | None = None
    ) -> Scored:
        return scored(self.client.forward_backward(list(data), loss, config))

    def step(self, adam: types.AdamParams) -> dict[str, float]:
        """The step's metrics."""
        return stepped(self.client.optim_step(adam))


def scored(future: Any) -> Scored:
    output: types.ForwardBackwardOutput = future.result(timeout=WAIT_S)
    logprobs = [record["logprobs"].to_numpy() for record in output.loss_fn_outputs]
    return Scored([np.asarray(values) for values in logprobs], dict(output.metrics))


def stepped(future: Any) -> dict[str, float]:
    response: types.OptimStepResponse = future.result(timeout=WAIT_S)
    return dict(response.metrics or {})


class Session:
    """Models that go when it ends."""

    def __init__(self, service: tinker.ServiceClient, base_model: str) -> None:
        self._service = service
        self._base_model = base_model

    def model(self, *, seed: int = SEED, rank: int = RANK) -> Model:
        """A fresh one; equal seeds and ranks make twins."""
        future = self._service.create_lora_training_client(base_model=self._base_model, rank=rank, seed=seed)
        return Model(future.result(timeout=WAIT_S))


@dataclass(frozen=True, slots=True)
class Wire:
    """Where the server is, and as whom to talk to it."""

    url: str
    api_key: str
    base_model: str

    @contextlib.contextmanager
    def session(self) -> Iterator[Session]:
        service = self._service()
        try:
            yield Session(service, self.base_model)
        finally:
            with contextlib.suppress(tinker.TinkerError, TimeoutError):
                service.close("success").result(timeout=WAIT_S)

    def _service(self) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.url, api_key=self.api_key)


def connect(url: str, api_key: str, base_model: str | None) -> Wire:
    """The server at `url`, its first trainable model unless one is named. Raises Unreachable."""
    _knock(url, api_key)
    try:
        service = tinker.ServiceClient(base_url=url, api_key=api_key)
        if base_model is None:
            served = service.create_rest_client().get_server_capabilities().result(timeout=WAIT_S)
            models = [m.model_name for m in served.supported_models if m.model_name]
            if not models:
                raise Unreachable(f"{url} names no model that it serves: name one with --base-model")
            base_model = str(models[0])
    except tinker.TinkerError as error:
        raise Unreachable(f"{url} answers the SDK with: {error}") from None
    return Wire(url, api_key, base_model)


def _knock(url: str, api_key: str) -> None:
    """Ask once for what every client asks first: the SDK itself would try for minutes."""
    try:
        answer = httpx.post(
            f"{url.rstrip('/')}/api/v1/client/config",
            json={"sdk_version": tinker.__version__},
            headers={"x-api-key": api_key},
            timeout=CONNECT_S,
        )
    except httpx.HTTPError as error:
        raise Unreachable(f"{url} does not answer: {error}") from None
    if answer.status_code in (401, 403):
        raise Unreachable(f"{url} refuses the API key ({answer.status_code})")
    if answer.status_code == 404:
        raise Unreachable(f"{url} has no /api/v1/client/config: it is not a Tinker-compatible server")
