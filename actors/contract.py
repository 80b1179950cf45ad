"""What a group's driver and its ranks tell each other: configuration, outputs, failures.

No Megatron in here, which takes seconds to import: whoever drives ranks has to be back fast after a crash.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from actors.layout import Layout
from actors.transforms.fake_int4 import FakeInt4

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Which layers an adapter touches, and how strongly."""

    rank: int
    alpha: float
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True)
class FullConfig:
    """Every parameter of the model trains. It starts from the base weights, so there is nothing to choose."""


TenantConfig = AdapterConfig | FullConfig


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What a rank needs to know to come up."""

    model_folder: Path
    layout: Layout = field(default_factory=Layout)
    dump_gradients: Path | None = None
    """Folder for `gradient_dump`; None turns it off."""
    dtype: Dtype = "float32"
    """Of the base model. Adapters, gradients and optimizers are float32; "bfloat16" trains adapters only."""
    fused_head: bool = False
    """Compute logprobs in chunks of the vocabulary's logits, never whole."""
    fake_int4: FakeInt4 | None = None
    """Round the weights it names as an INT4 deployment will; None leaves them as they are."""
    max_resident_models: int = 0
    """Tenants in memory; the others are put away in `away`. 0 for no limit."""
    away: Path | None = None
    """Folder for tenants that are put away; each rank has one of its own in it."""


@dataclass(frozen=True, slots=True)
class MicrobatchOutput:
    """What one microbatch gives back."""

    index: int
    """Its number in the request."""
    logprobs: list[np.ndarray]
    """float32, one per datum of the microbatch in its order, shaped like the datum's targets."""
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What an optimizer step reports; the same on every rank."""

    grad_norm: float
    """Before clipping; NaN or inf where the gradient was."""
    skipped: bool
    """A non-finite gradient: weights and optimizer untouched, window cleared."""
    step: int
    window_calls: int
    window_tokens: int
    finalizations: int
    """Of this window: always 1."""
    seconds: float


class PassFailed(RuntimeError):
    """A request failed on this rank or another one; the window is as it was before it."""

    def __init__(self, error: str, *, elsewhere: bool = False) -> None:
        super().__init__(error)
        self.elsewhere = elsewhere
        """It was another rank, which says what happened."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _pass_failed, (str(self), self.elsewhere)


def _pass_failed(error: str, elsewhere: bool) -> PassFailed:
    return PassFailed(error, elsewhere=elsewhere)


class WindowIncomplete(RuntimeError):
    """The step's window lost the call `label`; the window was cleared and nothing stepped."""

    def __init__(self, label: int) -> None:
        super().__init__(label)
        self.label = label

    def __str__(self) -> str:
        return f"the window lost call {self.label}"
