"""Ranks that are wrong on purpose, to show that a check would notice."""

from __future__ import annotations

from typing import Any

from actors.group import MegatronGroup
from actors.rank import Rank


class FinalizesEveryCall(Rank):
    """Sums gradients over the ranks after each `forward_backward` instead of once per step."""

    def execute(self, operation: str, *arguments: Any) -> Any:
        if operation not in ("forward_backward", "optim_step"):
            return super().execute(operation, *arguments)
        window = self._engine.tenants.activate(arguments[0]).window
        finalize = type(window).finalize
        window.finalize = lambda: None  # type: ignore[method-assign]
        result = super().execute(operation, *arguments)
        if operation == "forward_backward":
            finalize(window)
        return result


class GroupThatFinalizesEveryCall(MegatronGroup):
    rank_class = FinalizesEveryCall
