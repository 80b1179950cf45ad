"""Adapters on the rows of one batch: every linear layer adds to each row what its adapter says.

One pass serves rows of many adapters and of the base model. A row's sum has the same terms whatever its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from runtime.sampler.adapter import Adapter
from runtime.sampler.contract import SamplingRefused


class Router:
    """Hooks on all linear layers of a model; made once."""

    def __init__(self, model: nn.Module) -> None:
        self._active: list[tuple[Adapter, Tensor | None]] = []
        self._linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
        for name, linear in self._linears.items():
            linear.register_forward_hook(self._hook(name))

    def check(self, adapter: Adapter) -> None:
        """Raises SamplingRefused where the base model has no such layer, or one of another size."""
        for name, (a, b) in adapter.layers.items():
            linear = self._linears.get(name)
            if linear is None:
                raise SamplingRefused(f"the adapter is for {name}, which the base model does not have")
            if (a.shape[1], b.shape[0]) != (linear.in_features, linear.out_features):
                raise SamplingRefused(
                    f"the adapter's {name} goes from {a.shape[1]} to {b.shape[0]} features, the base model's from "
                    f"{linear.in_features} to {linear.out_features}"
                )

    def has(self, adapter: Adapter) -> bool:
        """Whether every module that it adapts is a linear layer here."""
        return adapter.layers.keys() <= self._linears.keys()

    def route(self, rows: Sequence[Adapter | None]) -> None:
        """The adapter of each row of the passes that follow."""
        by_adapter: dict[Adapter, list[int]] = {}
        for row, adapter in enumerate(rows):
            if adapter is not None:
                by_adapter.setdefault(adapter, []).append(row)
        self._active = [
            (adapter, None if len(at) == len(rows) else torch.tensor(at))
            for adapter, at in by_adapter.items()
        ]

    def _hook(self, name: str) -> Any:
        def add(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            for adapter, rows in self._active:
                layer = adapter.layers.get(name)
                if layer is None:
                    continue
                x = inputs[0] if rows is None else inputs[0][rows]
                delta = functional.linear(functional.linear(x.float(), layer[0]), layer[1]) * adapter.scaling
                delta = delta.to(output.dtype)
                output = output + delta if rows is None else output.index_add(0, rows, delta)
            return output

        return add
