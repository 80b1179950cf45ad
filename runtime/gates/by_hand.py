"""The SDK's wire without the SDK's client: one request, byte for byte, as often as one likes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import httpx
import tinker
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output

from runtime.gates.wire import WAIT_S, Scored, Wire

PROTOBUF, JSON = "application/x-protobuf", "application/json"


class Refused(tinker.TinkerError):
    """An answer other than a future or its result."""


class ByHand:
    """The training endpoints of one server, over plain HTTP."""

    def __init__(self, wire: Wire) -> None:
        self._http = httpx.Client(
            base_url=f"{wire.url.rstrip('/')}/api/v1/",
            headers={"x-api-key": wire.api_key, "accept": JSON},
            timeout=WAIT_S,
        )

    def __enter__(self) -> ByHand:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def forward_backward(
        self, model_id: str, seq_id: int, data: Sequence[types.Datum], *, forward_only: bool = False
    ) -> str:
        """POST a `cross_entropy`; its request id."""
        request = forward_backward_request_to_proto(
            types.ForwardBackwardRequest(
                forward_backward_input=types.ForwardBackwardInput(data=list(data), loss_fn="cross_entropy"),
                model_id=model_id,
                seq_id=seq_id,
            )
        )
        request.forward_only = forward_only
        return self._future("forward_backward", request.SerializeToString(deterministic=True), PROTOBUF)

    def optim_step(self, model_id: str, seq_id: int, adam: types.AdamParams) -> str:
        """POST a step; its request id."""
        request = types.OptimStepRequest(model_id=model_id, seq_id=seq_id, adam_params=adam)
        return self._future("optim_step", request.model_dump_json(exclude_none=True).encode(), JSON)

    def scored(self, request_id: str) -> Scored:
        """The result of a `forward_backward`, waited for."""
        output = deserialize_forward_backward_output(self._result(request_id, PROTOBUF).content)
        return Scored(
            [record["logprobs"].to_numpy() for record in output.loss_fn_outputs], dict(output.metrics)
        )

    def stepped(self, request_id: str) -> dict[str, float]:
        """The metrics of a step, waited for."""
        metrics = self._result(request_id, JSON).json().get("metrics") or {}
        return {name: float(value) for name, value in metrics.items()}

    def _future(self, path: str, body: bytes, content_type: str) -> str:
        answer = self._http.post(path, content=body, headers={"content-type": content_type})
        if answer.status_code != httpx.codes.OK:
            raise Refused(f"{path} answers {answer.status_code}: {answer.text}")
        return str(answer.json()["request_id"])

    def _result(self, request_id: str, accept: str) -> httpx.Response:
        deadline = time.monotonic() + WAIT_S
        asked = {"request_id": request_id, "allow_metadata_only": False}
        while time.monotonic() < deadline:
            answer = self._http.post("retrieve_future", json=asked, headers={"accept": accept})
            if answer.status_code == httpx.codes.REQUEST_TIMEOUT or _try_again(answer):
                continue
            if answer.status_code != httpx.codes.OK or "error" in _fields(answer):
                raise Refused(f"retrieve_future answers {answer.status_code}: {answer.text}")
            return answer
        raise TimeoutError(f"no result of {request_id} in {WAIT_S:g} s")


def _fields(answer: httpx.Response) -> dict[str, Any]:
    """The answer's JSON object; empty for protobuf."""
    if not answer.headers.get("content-type", "").startswith(JSON):
        return {}
    found = answer.json()
    return found if isinstance(found, dict) else {}


def _try_again(answer: httpx.Response) -> bool:
    return _fields(answer).get("type") == "try_again"
