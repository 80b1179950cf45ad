"""The events of the bus: operations that go onto the log, and the results that come back.

Every struct is frozen and refuses unknown fields; a message carries its format number, readers accept all
older ones and refuse newer ones by name. Words are Tinker's: datum, model_input, loss_fn_inputs, seq_id.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

FORMAT = 1
"""Format number written into every message. Readers accept this one and all older ones."""

DType: TypeAlias = Literal["float32", "int64", "int32"]
ITEM_SIZE: dict[str, int] = {"float32": 4, "int64": 8, "int32": 4}


class Event(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of everything on the bus."""


class Tensor(Event, frozen=True):
    """A dense array, row-major and little-endian."""

    dtype: DType
    shape: tuple[int, ...]
    data: bytes | tuple[float | int, ...]
    """Raw bytes; as JSON either base64 of them or a list of numbers."""


Array: TypeAlias = Tensor | tuple[float | int, ...]
"""A tensor, or a plain list of numbers whose dtype follows from the field it stands in (1-D)."""


class Datum(Event, frozen=True):
    """One training example. `model_input[i]` predicts `target_tokens[i]`; the server shifts nothing."""

    model_input: Array
    """Token ids, shape (N,), N ≥ 1."""
    loss_fn_inputs: dict[str, Array]
    """What the loss asks for, by name: `target_tokens`, `weights`, `logprobs`, `advantages`, each (N,) or (N, K)."""


class LossChoice(Event, frozen=True):
    """A registered loss and its configuration."""

    name: str
    config: dict[str, float | str] = {}


class AdamParams(Event, frozen=True):
    """Hyperparameters of one optimizer step; they act on that step alone. Defaults are the SDK's."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Global-norm limit; 0 turns clipping off."""


class LoraConfig(Event, frozen=True):
    """The adapter of one model. `alpha` is the server's (32 unless configured)."""

    rank: int
    seed: int | None = None
    """Seed of the adapter's initial weights; None stands for 0."""
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


# ---------------------------------------------------------------------------------------------- operations


class Checkpoint(Event, frozen=True):
    """Which checkpoint is to be loaded, and how much of it."""

    path: str
    """`tinker://<model_id>/weights/<name>`"""
    optimizer: bool = False
    """True goes on with its optimizer state; False starts a fresh optimizer."""


class CreateModel(Event, frozen=True, tag_field="type", tag="create_model"):
    """Always number 0 of its model."""

    base_model: str
    """With `start`, empty for whatever the checkpoint was trained on."""
    lora: LoraConfig | None = None
    """None asks for full-parameter training; with `start`, what the checkpoint has is taken."""
    user_metadata: dict[str, str] = {}
    start: Checkpoint | None = None
    """None starts from the base model."""


class ForwardBackward(Event, frozen=True, tag_field="type", tag="forward_backward"):
    """Add the gradient of one batch to the model's window."""

    data: tuple[Datum, ...]
    """At least one. Outputs come back in this order."""
    loss: LossChoice
    """Name and config of a registered loss; applies to this request alone."""
    forward_only: bool = False
    """Score the batch on the same path and leave the window as it is."""


class OptimStep(Event, frozen=True, tag_field="type", tag="optim_step"):
    """Finalize the window's gradient once, and step AdamW with these hyperparameters."""

    adam_params: AdamParams = AdamParams()


class SaveWeights(Event, frozen=True, tag_field="type", tag="save_weights"):
    """Write a training checkpoint: weights, optimizer, counters."""

    name: str
    ttl_seconds: int | None = None
    """Seconds until it is deleted; None keeps it."""
    overwrite: bool = False
    """Whether a checkpoint of this name may be there already, and is replaced."""
    user_metadata: dict[str, str] = {}


class SaveWeightsForSampler(Event, frozen=True, tag_field="type", tag="save_weights_for_sampler"):
    """Write weights to sample from: under a name, or for one sampling session."""

    name: str | None = None
    sampling_session_id: str | None = None
    """The session that is to sample from them, where they have no name."""
    inflight: bool = False
    """The one target of its model: what samples from it goes on with the new weights."""
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] = {}


class SaveWeightsExternal(Event, frozen=True, tag_field="type", tag="save_weights_external"):
    """Write weights for other programs: a PEFT adapter folder, or a whole Hugging Face model folder."""

    name: str
    ttl_seconds: int | None = None


class LoadWeights(Event, frozen=True, tag_field="type", tag="load_weights"):
    """Go on from a checkpoint of the same base model and adapter configuration. Ends the open window."""

    checkpoint: Checkpoint


class UnloadModel(Event, frozen=True, tag_field="type", tag="unload_model"):
    """End a model once every operation logged before this one has run. Has no `seq_id`."""


class Refused(Event, frozen=True, tag_field="type", tag="refused"):
    """Stands on the log for a request that could not be understood, so that its number is used up."""

    error: str
    field: str | None = None
    verb: str | None = None
    """The operation it would have been, where that is known."""


Op: TypeAlias = (
    CreateModel
    | ForwardBackward
    | OptimStep
    | SaveWeights
    | SaveWeightsForSampler
    | SaveWeightsExternal
    | LoadWeights
    | UnloadModel
    | Refused
)

VERBS = (
    "create_model",
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "load_weights",
    "unload_model",
    "refused",
)


class Submission(Event, frozen=True):
    """What an event client publishes on `tinker.v1.submit.<tenant>.<model_id>`."""

    seq_id: int | None
    """0 creates the model, then 1, 2, 3 … without a gap; None only for `unload_model`."""
    op: Op
    format: int = FORMAT


# ------------------------------------------------------------------------------------------------- results


class ModelCreated(Event, frozen=True, tag_field="type", tag="model_created"):
    model_id: str
    base_model: str
    lora: LoraConfig | None = None


class ForwardBackwardDone(Event, frozen=True, tag_field="type", tag="forward_backward_done"):
    loss_fn_outputs: tuple[dict[str, Tensor], ...]
    """One mapping per datum, in the request's order. `logprobs`: float32, shaped like `target_tokens`, nats."""
    metrics: dict[str, float]
    """Keys are `name:reduction`; `loss:sum` is always there."""


class OptimStepDone(Event, frozen=True, tag_field="type", tag="optim_step_done"):
    metrics: dict[str, float]


class WeightsSaved(Event, frozen=True, tag_field="type", tag="weights_saved"):
    path: str | None = None
    """`tinker://<model_id>/<weights|sampler_weights|external_weights>/<name>`; None for weights without a name."""
    sampling_session_id: str | None = None
    """The session that samples from them, where they have no name."""
    size_bytes: int | None = None


class WeightsLoaded(Event, frozen=True, tag_field="type", tag="weights_loaded"):
    path: str
    model_id: str


class ModelUnloaded(Event, frozen=True, tag_field="type", tag="model_unloaded"):
    model_id: str


class TopLogprobs(Event, frozen=True):
    """The likeliest tokens at each of N positions, K columns, likeliest first. An empty cell holds 0 and -99999.0."""

    token_ids: Tensor
    """int32, shape (N, K)."""
    logprobs: Tensor
    """float32, shape (N, K), nats."""


class SampledSequence(Event, frozen=True):
    """One generated sequence. What ended it, a token or a text, is its end."""

    tokens: Tensor
    """int32, shape (N,)."""
    logprobs: Tensor
    """float32, shape (N,), nats: of the distribution at the request's temperature, before top-k and top-p."""
    stop_reason: Literal["stop", "length"]
    top_logprobs: TopLogprobs | None = None
    """Of the same distribution."""


class TargetLogprobs(Event, frozen=True):
    """Logprobs of the token ids that the request named, in the layout in which it named them; 0 where it named -1."""

    logprobs: Tensor
    """float32: shape (N - 1, K), or (nnz,) with the CSR indices below."""
    shape: tuple[int, int]
    crow_indices: tuple[int, ...] | None = None
    col_indices: tuple[int, ...] | None = None


class PromptAltTokens(Event, frozen=True):
    """Tokens drawn at each prompt position after the first, at the request's temperature."""

    tokens: Tensor
    """int32, shape (N - 1, K)."""
    logprobs: Tensor
    """float32, shape (N - 1, K), nats."""


class Sampled(Event, frozen=True, tag_field="type", tag="sampled"):
    """What a sampling request gave; `model_id` of its result is the sampling session's."""

    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: Tensor | None = None
    """float32, shape of the prompt, nats, at temperature 1; NaN at the first token and where none was asked for."""
    top_prompt_logprobs: TopLogprobs | None = None
    target_prompt_logprobs: TargetLogprobs | None = None
    prompt_alt_tokens: PromptAltTokens | None = None


class Failed(Event, frozen=True, tag_field="type", tag="failed"):
    error: str
    category: Literal["user", "server", "unknown"]
    field: str | None = None
    """The offending field of the request, as a path: `data[3].loss_fn_inputs.advantages`."""


Outcome: TypeAlias = (
    ModelCreated
    | ForwardBackwardDone
    | OptimStepDone
    | WeightsSaved
    | WeightsLoaded
    | ModelUnloaded
    | Sampled
    | Failed
)


class Result(Event, frozen=True):
    """The one answer to the operation (`model_id`, `seq_id`)."""

    request_id: str
    model_id: str
    seq_id: int | None
    outcome: Outcome
    format: int = FORMAT


def request_id(model_id: str, seq_id: int | None) -> str:
    """The request id of an operation: a pure function of its identity, the same on every server.

    >>> request_id("run-1:train:0", 4)
    'run-1:train:0#4'
    """
    return f"{model_id}#{'end' if seq_id is None else seq_id}"


def parse_request_id(text: str) -> tuple[str, int | None]:
    """The inverse of `request_id`. Raises ValueError for anything it did not make."""
    model_id, mark, number = text.rpartition("#")
    if not mark or not model_id:
        raise ValueError(f"request_id {text!r} is malformed: it has the form MODEL_ID#SEQ_ID")
    if number == "end":
        return model_id, None
    if not (number.isascii() and number.isdigit()) or (len(number) > 1 and number[0] == "0"):
        raise ValueError(f"request_id {text!r} is malformed: {number!r} is not a seq_id")
    return model_id, int(number)


def sample_request_id(sampling_session_id: str, seq_id: int) -> str:
    """The request id of a sampling request: no operation of a model ever has one like it.

    >>> sample_request_id("run-1:sample:0", 4)
    'run-1:sample:0#s4'
    """
    return f"{sampling_session_id}#s{seq_id}"


def parse_sample_request_id(text: str) -> tuple[str, int] | None:
    """The inverse of `sample_request_id`; None for what it did not make."""
    session, mark, number = text.rpartition("#s")
    if not mark or not session or not (number.isascii() and number.isdigit()):
        return None
    if len(number) > 1 and number[0] == "0":
        return None
    return session, int(number)
