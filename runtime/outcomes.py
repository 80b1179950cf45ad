"""From what the ranks return to what the bus carries: result structs, and errors in words. Pure.

Nothing that differs between a run and its replay goes into a result: no clock, no process.
"""

from __future__ import annotations

from actors.contract import StepOutput
from actors.group import RequestOutput
from bus.events import (
    CreateModel,
    Failed,
    ForwardBackwardDone,
    LoraConfig,
    ModelCreated,
    OptimStepDone,
    Tensor,
    WeightsLoaded,
    WeightsSaved,
)
from runtime.checks import Refusal


def created(model_id: str, op: CreateModel) -> ModelCreated:
    return ModelCreated(model_id=model_id, base_model=op.base_model, lora=op.lora)


def created_from(model_id: str, base_model: str, lora: LoraConfig | None) -> ModelCreated:
    return ModelCreated(model_id=model_id, base_model=base_model, lora=lora)


def loaded(path: str, model_id: str) -> WeightsLoaded:
    return WeightsLoaded(path=path, model_id=model_id)


def saved(path: str, size_bytes: int) -> WeightsSaved:
    return WeightsSaved(path=path, size_bytes=size_bytes)


def session_opened(sampling_session_id: str) -> WeightsSaved:
    return WeightsSaved(sampling_session_id=sampling_session_id)


def forward_backward_done(output: RequestOutput) -> ForwardBackwardDone:
    return ForwardBackwardDone(
        loss_fn_outputs=tuple(
            {"logprobs": Tensor(dtype="float32", shape=values.shape, data=values.astype("<f4").tobytes())}
            for values in output.logprobs
        ),
        metrics=output.metrics,
    )


def optim_step_done(step: StepOutput) -> OptimStepDone:
    return OptimStepDone(
        metrics={
            "grad_norm": step.grad_norm,
            "step": float(step.step),
            "skipped": float(step.skipped),
            "window_calls": float(step.window_calls),
            "window_tokens": float(step.window_tokens),
            "finalizations": float(step.finalizations),
        }
    )


def name_taken(error: str, field: str) -> Failed:
    return Failed(error=error, category="user", field=field)


def not_saved(error: Exception) -> Failed:
    return Failed(
        error=f"the weights were not saved, and the model is as it was: {error or type(error).__name__}",
        category="server",
    )


def not_loaded(because: str) -> Failed:
    return Failed(error=f"nothing was loaded, and the model is as it was: {because}", category="server")


def told_before(row_outcome: str, seq_id: int | None) -> Failed:
    """Of a save or load that is over, whose result is kept no more; nobody reads this."""
    return Failed(
        error=f"seq_id {seq_id} was {row_outcome}, and its result is no longer kept", category="unknown"
    )


def refused(refusal: Refusal) -> Failed:
    return Failed(error=refusal.error, category="user", field=refusal.field)


def not_created(model_id: str, because: str) -> Failed:
    return Failed(
        error=f"model_id {model_id!r} was not created: {because}", category="user", field="model_id"
    )


def model_lost(model_id: str, because: str) -> Failed:
    return Failed(error=f"model_id {model_id!r} is lost: {because}", category="server", field="model_id")


def unloaded(model_id: str) -> Failed:
    return Failed(error=f"model_id {model_id!r} was unloaded", category="user", field="model_id")


def gap(seq_id: int, timeout_s: float) -> Failed:
    return Failed(
        error=f"seq_id {seq_id} did not come within {timeout_s:g} s of the model's last operation",
        category="user",
    )


def behind_gap(missing: int) -> Failed:
    return Failed(
        error=f"seq_id {missing} never came, and this operation was waiting for it",
        category="user",
        field="seq_id",
    )


def step_lost(seq_id: int) -> Failed:
    return Failed(
        error=f"the window lost forward_backward seq_id {seq_id}, which failed after this step was sent; "
        "the window was cleared and no step was taken",
        category="user",
        field="seq_id",
    )


def failed_on_ranks(error: BaseException) -> Failed:
    return Failed(error=f"the operation failed on the ranks and changed nothing: {error}", category="server")


def given_up(tries: int) -> Failed:
    return Failed(
        error=f"the operation took the ranks down {tries} times while it ran alone, and was given up; "
        "it changed nothing",
        category="server",
    )


def body_lost(error: str) -> Failed:
    return Failed(error=f"the operation did not run: {error}", category="server")
