"""What of the official SDK's API is served, field by field; `docs/compatibility.md` is made from this.

`python -m runtime.ingress.compatibility > docs/compatibility.md` writes it. Tests hold the list to the routes of the
application, to the SDK's own request types, and to what the server answers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from runtime.ingress import json_passes, requests
from runtime.ingress.sample_request import AsampleRequest

SERVED = "supported"
NO_EFFECT = "accepted, without effect"
REFUSED = "refused"

NOT_YET: frozenset[str] = frozenset()
"""Endpoints whose rows below say what is to be; in this release they are refused by name."""

_PROJECT = f"{SERVED}: a tenant has one project, called as itself; another is {REFUSED}"
_PAGE = {"limit": f"{SERVED}: 1 to 1000", "offset": SERVED}
_SCOPE = {"access_scope": f"{SERVED}: `owned`, or `accessible` for public ones as well"}
_OWN_SCOPE = {"access_scope": f"{SERVED}: `owned` or `accessible`, which are the same"}


@dataclass(frozen=True, slots=True)
class Endpoint:
    method: str
    path: str
    """Below `/api/v1/`, as its route has it."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """By name, what is done with each: one of the words above, and a reason or a limit."""
    only: str | None = None
    """What is done with the request as a whole, where that is not to serve it."""

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def verdict(self) -> str:
        if self.name in NOT_YET:
            return f"{REFUSED}: not served by this release"
        return self.only or SERVED

    def says(self, name: str) -> str:
        """What is done with a field."""
        return self.verdict if self.verdict.startswith(REFUSED) else self.fields[name]


def _of(request: type[msgspec.Struct], **others: str) -> dict[str, str]:
    """Every field of a request that this server reads, and what is said of some."""
    return {**dict.fromkeys(request.__struct_fields__, SERVED), **others}


def _served(*names: str, **others: str) -> dict[str, str]:
    return {**dict.fromkeys(names, SERVED), **others}


_RUN = "training_runs/{run_id}"
_CHECKPOINT = f"{_RUN}/checkpoints/{{checkpoint_id:path}}"

ENDPOINTS = (
    Endpoint("POST", "client/config", {"sdk_version": NO_EFFECT}),
    Endpoint("POST", "client/dynamic_config", {"sdk_version": NO_EFFECT}),
    Endpoint("POST", "auth/token", only=f"{REFUSED}: API keys are sent as they are"),
    Endpoint("GET", "get_server_capabilities"),
    Endpoint("GET", "healthz"),
    Endpoint(
        "POST",
        "telemetry",
        dict.fromkeys(("events", "platform", "sdk_version", "session_id", "process_uuid"), NO_EFFECT),
    ),
    Endpoint("POST", "create_session", _of(requests.CreateSessionRequest, project_id=_PROJECT)),
    Endpoint("POST", "session_heartbeat", _of(requests.HeartbeatRequest)),
    Endpoint("POST", "sessions/{session_id}/finish", _of(requests.FinishSessionRequest)),
    Endpoint("GET", "sessions", {**_PAGE, **_OWN_SCOPE}),
    Endpoint("GET", "sessions/{session_id}", _OWN_SCOPE),
    Endpoint("POST", "sessions/search", _of(requests.SessionSearchRequest, project_ids=_PROJECT)),
    Endpoint(
        "PUT",
        "sessions/{session_id}/project",
        {"project_id": SERVED},
        only=f"{REFUSED}: a tenant has one project",
    ),
    Endpoint("GET", "sessions/{session_id}/trace_export", only=f"{REFUSED}: no traces are kept"),
    Endpoint(
        "POST",
        "create_model",
        _of(
            requests.CreateModelRequest,
            lora_config=f"{SERVED}: rank, seed, train_attn, train_mlp, train_unembed",
            optimizer_config=f"{SERVED}: adamw; dimuon is {REFUSED}",
        ),
    ),
    Endpoint("POST", "get_info", _of(requests.ModelRequest)),
    Endpoint("POST", "unload_model", _of(requests.ModelRequest)),
    Endpoint(
        "POST",
        "forward_backward",
        _served(
            "model_id",
            "seq_id",
            "loss_fn",
            "loss_fn_config",
            data=f"{SERVED}: text tokens; images and audio are {REFUSED}",
            forward_only=SERVED,
            forward_backward_input=f"{SERVED}: as JSON, of SDKs that send no protobuf",
        ),
    ),
    Endpoint("POST", "forward", _of(json_passes.ForwardRequest)),
    Endpoint(
        "POST",
        "optim_step",
        _of(
            requests.OptimStepRequest,
            optimizer_params=f"{SERVED}: adamw; dimuon is {REFUSED}",
        ),
    ),
    Endpoint(
        "POST",
        "create_custom_loss",
        _served("session_id", "custom_loss_seq_id", "name", "inputs", "graph", "type"),
        only=f"{REFUSED}: the client computes custom losses itself, as the SDK does by default",
    ),
    Endpoint("POST", "retrieve_future", _of(requests.RetrieveFutureRequest, allow_metadata_only=NO_EFFECT)),
    Endpoint("POST", "retrieve_futures", _of(requests.RetrieveFuturesRequest)),
    Endpoint("POST", "cancel_future", _of(requests.CancelFutureRequest)),
    Endpoint("POST", "save_weights", _of(requests.SaveWeightsRequest)),
    Endpoint(
        "POST",
        "load_weights",
        _of(
            requests.LoadWeightsRequest,
            optimizer_config=f"{SERVED}: adamw, of a new model; dimuon is {REFUSED}",
            weights_access_token=f"{REFUSED}: publish the checkpoint instead",
        ),
    ),
    Endpoint("POST", "save_weights_for_sampler", _of(requests.SaveWeightsForSamplerRequest)),
    Endpoint(
        "POST",
        "save_weights_external",
        _of(
            requests.SaveWeightsExternalRequest,
            age_encryption_recipients=f"{REFUSED}: exports are not encrypted",
        ),
    ),
    Endpoint("POST", "create_sampling_session", _of(requests.CreateSamplingSessionRequest)),
    Endpoint("POST", "join_sampling_session", _of(requests.JoinSamplingSessionRequest)),
    Endpoint("GET", "samplers/{sampler_id}"),
    Endpoint(
        "POST",
        "asample",
        _of(
            AsampleRequest,
            prompt=f"{SERVED}: text tokens; images and audio are {REFUSED}",
            record_stability_info=f"{REFUSED}: there is no loss that needs it",
            base_model=f"{REFUSED}: the SDK makes a sampling session",
            model_path=f"{REFUSED}: the SDK makes a sampling session",
        ),
    ),
    Endpoint("POST", "weights_info", _of(requests.WeightsInfoRequest)),
    Endpoint("GET", "training_runs", {**_PAGE, **_SCOPE, "project_id": _PROJECT}),
    Endpoint("GET", _RUN, _SCOPE),
    Endpoint("GET", f"{_RUN}/checkpoints"),
    Endpoint("GET", "checkpoints", _PAGE),
    Endpoint("DELETE", _CHECKPOINT),
    Endpoint("POST", f"{_CHECKPOINT}/publish"),
    Endpoint("DELETE", f"{_CHECKPOINT}/publish"),
    Endpoint(
        "PUT",
        f"{_CHECKPOINT}/ttl",
        _of(requests.CheckpointTtlRequest, ttl_seconds=f"{SERVED}: an hour to 10 years, or null"),
    ),
    Endpoint("GET", f"{_CHECKPOINT}/external_weights_urls"),
    Endpoint("GET", f"{_CHECKPOINT}/archive"),
    Endpoint(
        "GET",
        "downloads/{run_id}/{checkpoint_id:path}",
        _served("file", "expires", "signature"),
    ),
    Endpoint(
        "POST",
        "copy_weights",
        _of(
            requests.CopyWeightsRequest,
            destination_project_id=_PROJECT,
            ttl_seconds=f"{SERVED}: an hour to 10 years",
            weights_access_token=f"{REFUSED}: publish the checkpoint instead",
        ),
    ),
    Endpoint("GET", "audit", only=f"{REFUSED}: not an endpoint here (404)"),
    Endpoint("GET", "billing/usage/events", only=f"{REFUSED}: not an endpoint here (404)"),
    Endpoint("GET", "billing/usage/checkpoints/current", only=f"{REFUSED}: not an endpoint here (404)"),
    Endpoint("GET", "auth/apikey/me", only=f"{REFUSED}: not an endpoint here (404)"),
    Endpoint("DELETE", "auth/apikey/me", only=f"{REFUSED}: not an endpoint here (404)"),
)

_HEAD = """\
# Compatibility with the Tinker SDK

Every endpoint that `tinker` 0.38 calls, those that only older versions call, and every field of their requests. A field
that is not here is refused by name. This page is made by `python -m runtime.ingress.compatibility`; tests hold it to
the routes, to the SDK's types and to the server's answers.

| endpoint | field | here |
|---|---|---|
"""


def text() -> str:
    """The page."""
    rows = [
        f"| `{endpoint.name.replace(':path', '')}` | {shown} | {said} |"
        for endpoint in ENDPOINTS
        for shown, said in [
            ("the request", endpoint.verdict),
            *((f"`{name}`", endpoint.says(name)) for name in endpoint.fields),
        ]
    ]
    return _HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
