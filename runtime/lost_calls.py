"""Which optimizer steps must fail because their window lost a `forward_backward`. Pure.

A step that was on the log already when the failure became known could not take it into account: it fails, naming
the lost call, and its window is cleared. A step appended later could, and works on what is there.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one step may do."""

    lost: int | None
    """The lost call that fails the step, or None when it may run."""
    known: frozenset[int]
    """Lost calls of its window that it knew of."""


@dataclass(slots=True)
class OpenWindow:
    """Failed calls of one model's open window."""

    horizons: dict[int, int] = field(default_factory=dict)
    """Per lost call: the log's last position when its failure was published."""
    last_step: int = 0


class LostCalls:
    """Failed `forward_backward` calls of open windows, per model."""

    def __init__(self) -> None:
        self._models: dict[str, OpenWindow] = {}

    def add(self, model_id: str, seq_id: int, horizon: int) -> None:
        """A call failed. One whose window is over already, its step having failed on the ranks, is no news."""
        model = self._models.setdefault(model_id, OpenWindow())
        if seq_id > model.last_step:
            model.horizons[seq_id] = horizon

    def settle(self, model_id: str, step_seq_id: int, position: int) -> Verdict:
        """Judge the step at log position `position`; its window ends with it. Steps come in order."""
        model = self._models.setdefault(model_id, OpenWindow())
        horizons, model.horizons, model.last_step = model.horizons, {}, step_seq_id
        unknown = [seq_id for seq_id, horizon in horizons.items() if position <= horizon]
        return Verdict(min(unknown, default=None), frozenset(horizons) - frozenset(unknown))

    def state(self, model_id: str) -> OpenWindow:
        """A copy of what is known of the model."""
        model = self._models.get(model_id, OpenWindow())
        return OpenWindow(dict(model.horizons), model.last_step)

    def resume(self, model_id: str, state: OpenWindow) -> None:
        """Go on where a snapshot was taken."""
        self._models[model_id] = OpenWindow(dict(state.horizons), state.last_step)

    def forget(self, model_id: str) -> None:
        self._models.pop(model_id, None)
