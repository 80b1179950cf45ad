"""The SDK's JSON requests, as far as this server honours them. A field that is not here is refused by name.

The SDK leaves out what is None and sends what is default, so everything optional may be missing.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec

from bus.errors import CodecError
from bus.events import AdamParams, CreateModel, LoraConfig, OptimStep
from runtime.ingress.body import convert

TRAINING = "tinkerbus.training"
"""Key in a model's `user_metadata` by which HTTP clients choose between "lora" and "full"."""


class SdkRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the SDK's request bodies."""


class CreateSessionRequest(SdkRequest, frozen=True):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    display_name: str | None = None
    """For people to read."""
    project_id: str | None = None
    type: Literal["create_session"] = "create_session"


class HeartbeatRequest(SdkRequest, frozen=True):
    session_id: str
    type: Literal["session_heartbeat"] = "session_heartbeat"


class CreateModelRequest(SdkRequest, frozen=True):
    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    """Taken no notice of where `user_metadata` asks for full-parameter training."""
    optimizer_config: dict[str, Any] | None = None
    type: Literal["create_model"] = "create_model"


class OptimStepRequest(SdkRequest, frozen=True):
    model_id: str
    seq_id: int
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None
    type: Literal["optim_step"] = "optim_step"


class ModelRequest(SdkRequest, frozen=True):
    """`get_info` and `unload_model`."""

    model_id: str
    type: Literal["get_info", "unload_model"] | None = None


class RetrieveFutureRequest(SdkRequest, frozen=True):
    request_id: str
    allow_metadata_only: bool = False
    """Results are sent whole in any case."""


class WeightsInfoRequest(SdkRequest, frozen=True):
    tinker_path: str


class CheckpointTtlRequest(SdkRequest, frozen=True):
    ttl_seconds: int | None
    """None keeps it."""


class CopyWeightsRequest(SdkRequest, frozen=True):
    """Into a project, or into a session under a number that no model of it has."""

    source_path: str
    destination_project_id: str | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    ttl_seconds: int | None = None


class FinishReason(SdkRequest, frozen=True):
    type: Literal["success", "errored", "interrupted"]


class FinishSessionRequest(SdkRequest, frozen=True):
    reason: FinishReason | None = None
    detail: str | None = None


class SearchOwner(SdkRequest, frozen=True):
    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: list[str] | None = None
    """Names of tenants; with `user` alone."""


class SearchStatus(SdkRequest, frozen=True):
    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: list[Literal["success", "errored", "interrupted"]] | None = None


class SearchCursor(SdkRequest, frozen=True):
    last_created_at: datetime
    last_session_id: str


class SessionSearchRequest(SdkRequest, frozen=True):
    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = {}
    display_name: str | None = None
    owner: SearchOwner = SearchOwner()
    statuses: list[SearchStatus] | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=200)] = 50
    cursor: SearchCursor | None = None


def create_model(fields: dict[str, Any]) -> CreateModel:
    """Raises CodecError for what cannot be honoured."""
    request = convert(fields, CreateModelRequest)
    optimizer = request.optimizer_config or {"type": "adamw"}
    _check_optimizer(optimizer, "optimizer_config")
    for name in sorted(set(optimizer) - {"type"}):
        raise CodecError(
            f"optimizer_config.{name} is not a field that this server knows", f"optimizer_config.{name}"
        )
    metadata = as_text(request.user_metadata)
    return CreateModel(
        base_model=request.base_model, lora=_adapter(request.lora_config, metadata), user_metadata=metadata
    )


def _adapter(lora: LoraConfig | None, metadata: dict[str, str]) -> LoraConfig | None:
    """None where every parameter is to train: the SDK always sends a `lora_config`, and has no field for that."""
    kind = metadata.get(TRAINING, "lora")
    if kind == "full":
        return None
    if kind != "lora":
        raise CodecError(
            f'user_metadata.{TRAINING} is {kind!r}; it must be "lora" or "full"',
            f"user_metadata.{TRAINING}",
        )
    if lora is None:
        raise CodecError(
            f'lora_config is missing; to train every parameter, set user_metadata.{TRAINING} to "full"',
            "lora_config",
        )
    return lora


def optim_step(fields: dict[str, Any]) -> OptimStep:
    """Raises CodecError for what cannot be honoured."""
    request = convert(fields, OptimStepRequest)
    if request.optimizer_params is not None:
        _check_optimizer(request.optimizer_params, "optimizer_params")
        if request.adam_params is not None:
            raise CodecError("adam_params and optimizer_params are both given: send one", "optimizer_params")
        given = {name: value for name, value in request.optimizer_params.items() if name != "type"}
        return OptimStep(adam_params=convert({"optimizer_params": given}, _AdamwParams).optimizer_params)
    if request.adam_params is None:
        raise CodecError("adam_params is missing", "adam_params")
    return OptimStep(adam_params=request.adam_params)


def as_text(metadata: dict[str, Any] | None) -> dict[str, str]:
    """Metadata with every value as text: JSON for what is none, keys in order so that bodies compare."""
    return {
        key: value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        for key, value in sorted((metadata or {}).items())
    }


class _AdamwParams(msgspec.Struct, frozen=True):
    optimizer_params: AdamParams


def _check_optimizer(config: dict[str, Any], field: str) -> None:
    kind = config.get("type")
    if kind != "adamw":
        raise CodecError(f"{field}.type is {kind!r}, but this server has 'adamw' alone", f"{field}.type")
