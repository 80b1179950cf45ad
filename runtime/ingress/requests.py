"""The SDK's JSON requests, as far as this server honours them. A field that is not here is refused by name.

The SDK leaves out what is None and sends what is default, so everything optional may be missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec

from bus.errors import CodecError
from bus.events import (
    AdamParams,
    Checkpoint,
    CreateModel,
    LoadWeights,
    LoraConfig,
    OptimStep,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
)
from runtime.checkpoints import paths
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


class SaveWeightsRequest(SdkRequest, frozen=True):
    model_id: str
    seq_id: int
    path: str | None = None
    """The checkpoint's name; None for one after its `seq_id`."""
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsForSamplerRequest(SdkRequest, frozen=True):
    model_id: str
    seq_id: int
    path: str | None = None
    """The checkpoint's name; None for weights of one sampling session."""
    sampling_session_seq_id: int | None = None
    """Number of that session, among those of the model's session."""
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: dict[str, Any] | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsExternalRequest(SdkRequest, frozen=True):
    model_id: str
    seq_id: int
    path: str
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None
    type: Literal["save_weights_external"] = "save_weights_external"


class LoadWeightsRequest(SdkRequest, frozen=True):
    """Into the model `model_id`, or as the first operation of a new one of `session_id`."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: dict[str, Any] | None = None
    weights_access_token: str | None = None
    type: Literal["load_weights"] = "load_weights"


class ModelRequest(SdkRequest, frozen=True):
    """`get_info` and `unload_model`."""

    model_id: str
    type: Literal["get_info", "unload_model"] | None = None


class CreateSamplingSessionRequest(SdkRequest, frozen=True):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    """Taken no notice of beside `model_path`, whose checkpoint says what it is of."""
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class JoinSamplingSessionRequest(SdkRequest, frozen=True):
    sampling_session_id: str
    type: Literal["join_sampling_session"] = "join_sampling_session"


class CancelFutureRequest(SdkRequest, frozen=True):
    request_id: str


class SamplingSessionTarget(SdkRequest, frozen=True):
    sampling_session_id: str
    cloned_sampler_id: int = 0
    type: Literal["sampling_session"] = "sampling_session"


class RetrieveFuturesRequest(SdkRequest, frozen=True):
    target: SamplingSessionTarget
    prev_cursor: int = 0
    timeout: float | None = None
    """Seconds to wait; None for as long as polls are held."""
    retrieved_request_ids: list[str] = []
    """Taken no notice of: results stay until they expire."""


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
    _check_adamw_alone(request.optimizer_config or {"type": "adamw"})
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


def save_weights(fields: dict[str, Any]) -> SaveWeights:
    """Raises CodecError for what cannot be honoured."""
    request = convert(fields, SaveWeightsRequest)
    return SaveWeights(
        name=_name(request.path if request.path is not None else str(request.seq_id)),
        ttl_seconds=request.ttl_seconds,
        overwrite=request.overwrite,
        user_metadata=as_text(request.user_metadata),
    )


def save_weights_external(fields: dict[str, Any]) -> SaveWeightsExternal:
    """Raises CodecError for what cannot be honoured."""
    request = convert(fields, SaveWeightsExternalRequest)
    if request.age_encryption_recipients is not None:
        raise CodecError(
            "age_encryption_recipients asks for encrypted files, which this server does not write",
            "age_encryption_recipients",
        )
    return SaveWeightsExternal(name=_name(request.path), ttl_seconds=request.ttl_seconds)


def save_weights_for_sampler(
    fields: dict[str, Any], session_of: Callable[[int], str]
) -> SaveWeightsForSampler:
    """`session_of` gives the id of a numbered sampling session. Raises CodecError for what cannot be honoured."""
    request = convert(fields, SaveWeightsForSamplerRequest)
    number = request.sampling_session_seq_id
    if (request.path is None) == (number is None):
        raise CodecError("path and sampling_session_seq_id: give one of them", "path")
    if request.path is not None and request.kind == "inflight":
        raise CodecError('kind is "inflight", but inflight weights have no name: leave path out', "kind")
    if number is not None and number < 0:
        raise CodecError(
            f"sampling_session_seq_id is {number}; it must be 0 or more", "sampling_session_seq_id"
        )
    return SaveWeightsForSampler(
        name=None if request.path is None else _name(request.path),
        sampling_session_id=None if number is None else session_of(number),
        inflight=request.kind == "inflight",
        ttl_seconds=request.ttl_seconds,
        user_metadata=as_text(request.user_metadata),
    )


def load_weights(fields: dict[str, Any]) -> LoadWeights:
    """Into a model that exists. Raises CodecError for what cannot be honoured."""
    request = convert(fields, LoadWeightsRequest)
    for name in ("session_id", "model_seq_id", "base_model", "user_metadata", "optimizer_config"):
        if getattr(request, name) is not None:
            raise CodecError(f"{name} is not for a model that exists: leave it out", name)
    return LoadWeights(checkpoint=_checkpoint(request))


def create_from(fields: dict[str, Any]) -> CreateModel:
    """A new model that starts from a checkpoint. Raises CodecError for what cannot be honoured."""
    request = convert(fields, LoadWeightsRequest)
    if request.optimizer_config is not None:
        _check_adamw_alone(request.optimizer_config)
    return CreateModel(
        base_model=request.base_model or "",
        user_metadata=as_text(request.user_metadata),
        start=_checkpoint(request),
    )


def _checkpoint(request: LoadWeightsRequest) -> Checkpoint:
    if request.weights_access_token is not None:
        raise CodecError(
            "weights_access_token is not known here: a checkpoint is its owner's, or published to all",
            "weights_access_token",
        )
    try:
        paths.parse(request.path)
    except ValueError as error:
        raise CodecError(str(error), "path") from None
    return Checkpoint(path=request.path, optimizer=request.optimizer)


def _name(path: str) -> str:
    if wrong := paths.wrong_name(path):
        raise CodecError(f"path: {wrong}", "path")
    return path


def as_text(metadata: dict[str, Any] | None) -> dict[str, str]:
    """Metadata with every value as text: JSON for what is none, keys in order so that bodies compare."""
    return {
        key: value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        for key, value in sorted((metadata or {}).items())
    }


class _AdamwParams(msgspec.Struct, frozen=True):
    optimizer_params: AdamParams


def _check_adamw_alone(optimizer: dict[str, Any]) -> None:
    """Of `optimizer_config`, which has nothing to say but which optimizer it is."""
    _check_optimizer(optimizer, "optimizer_config")
    for name in sorted(set(optimizer) - {"type"}):
        raise CodecError(
            f"optimizer_config.{name} is not a field that this server knows", f"optimizer_config.{name}"
        )


def _check_optimizer(config: dict[str, Any], field: str) -> None:
    kind = config.get("type")
    if kind != "adamw":
        raise CodecError(f"{field}.type is {kind!r}, but this server has 'adamw' alone", f"{field}.type")
