"""Operations and outcomes for reading: every field as it is, of a tensor its dtype and shape instead of its data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from bus.events import (
    Array,
    Checkpoint,
    CreateModel,
    Event,
    Failed,
    ForwardBackward,
    ForwardBackwardDone,
    LoadWeights,
    LoraConfig,
    ModelCreated,
    Op,
    OptimStep,
    OptimStepDone,
    Outcome,
    Refused,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
    Tensor,
    WeightsLoaded,
    WeightsSaved,
)


def summary(value: object) -> Any:
    """Dicts, lists, strings and numbers that JSON can say.

    A tensor is `{"dtype": …, "shape": […]}`, a plain list of a datum `{"shape": [N]}`, and a float that is not
    finite its name as a string.
    """
    if isinstance(value, Tensor):
        return {"dtype": value.dtype, "shape": list(value.shape)}
    if isinstance(value, Event):
        tag = value.__struct_config__.tag
        named = {} if tag is None else {"type": tag}
        return named | {name: _field(name, getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, Mapping):
        return {str(key): summary(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [summary(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _field(name: str, value: Any) -> Any:
    if name == "model_input":
        return _array(value)
    if name == "loss_fn_inputs":
        return {key: _array(array) for key, array in value.items()}
    return summary(value)


def _array(array: Array) -> Any:
    return summary(array) if isinstance(array, Tensor) else {"shape": [len(array)]}


def in_lines(value: Any, path: str = "", *, most: int = 16) -> Iterator[tuple[str, str]]:
    """A summary as (path, text), one for each leaf; of a longer list of tables the first `most`."""
    if isinstance(value, dict) and "shape" in value and value.keys() <= {"dtype", "shape"}:
        yield path, " ".join([*filter(None, [value.get("dtype")]), str(value["shape"])])
    elif isinstance(value, dict) and value:
        for name, item in value.items():
            yield from in_lines(item, f"{path}.{name}" if path else name, most=most)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for i, item in enumerate(value[:most]):
            yield from in_lines(item, f"{path}[{i}]", most=most)
        if len(value) > most:
            yield path, f"and {len(value) - most} more"
    else:
        yield path, str(value)


def op_in_a_line(op: Op) -> str:
    """What an operation asks for, in some words; empty where its verb says all."""
    match op:
        case CreateModel():
            if op.start is not None:
                return _checkpoint(op.start)
            return f"base_model={op.base_model} {_training(op.lora)}"
        case ForwardBackward():
            tokens = sum(_length(datum.model_input) for datum in op.data)
            scored = " forward_only" if op.forward_only else ""
            return f"loss={op.loss.name} datums={len(op.data)} tokens={tokens}{scored}"
        case OptimStep():
            return f"learning_rate={op.adam_params.learning_rate:g}"
        case SaveWeights() | SaveWeightsExternal():
            return f"name={op.name}"
        case SaveWeightsForSampler():
            whose = f"session={op.sampling_session_id}{' inflight' if op.inflight else ''}"
            return whose if op.name is None else f"name={op.name}"
        case LoadWeights():
            return _checkpoint(op.checkpoint)
        case Refused():
            return f"{op.error}{_at(op.field)}"
    return ""


def outcome_in_a_line(outcome: Outcome) -> str:
    """What came of an operation, in some words; empty where its type says all."""
    match outcome:
        case ModelCreated():
            return f"base_model={outcome.base_model} {_training(outcome.lora)}"
        case ForwardBackwardDone() | OptimStepDone():
            return " ".join(f"{name}={value:g}" for name, value in outcome.metrics.items())
        case WeightsSaved():
            size = "" if outcome.size_bytes is None else f" size_bytes={outcome.size_bytes}"
            return f"{outcome.path or f'session={outcome.sampling_session_id}'}{size}"
        case WeightsLoaded():
            return f"path={outcome.path}"
        case Failed():
            return f"category={outcome.category} {outcome.error}{_at(outcome.field)}"
    return ""


def type_of(event: Event) -> str:
    """The event's name on the wire: `optim_step`, `failed`."""
    return str(event.__struct_config__.tag)


def _checkpoint(checkpoint: Checkpoint) -> str:
    return f"path={checkpoint.path}{' optimizer' if checkpoint.optimizer else ''}"


def _training(lora: LoraConfig | None) -> str:
    return "full" if lora is None else f"lora_rank={lora.rank}"


def _length(array: Array) -> int:
    return math.prod(array.shape) if isinstance(array, Tensor) else len(array)


def _at(field: str | None) -> str:
    return f" (field {field})" if field else ""
