"""Models of an engine in this process, driven without Ray."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from actors.contract import AdapterConfig, PassFailed, StepOutput, TenantConfig
from actors.engine import Engine
from actors.group import RequestOutput, assemble
from actors.packing import PackedRequest
from actors.tenants import Tenant
from bus.events import AdamParams
from tests.support import dumps

Tensors = dict[str, Tensor]
ADAPTER = AdapterConfig(rank=8, alpha=32, seed=0)
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Step:
    """What a step reported and what it dumped, by PEFT name."""

    report: StepOutput
    gradient: Tensors
    """Before clipping."""
    before: Tensors
    after: Tensors
    exp_avg: Tensors
    exp_avg_sq: Tensors

    def everything(self) -> Tensors:
        """All dumped tensors under one key each, to compare bits."""
        kinds = ("gradient", "before", "after", "exp_avg", "exp_avg_sq")
        return {f"{kind}.{name}": t for kind in kinds for name, t in getattr(self, kind).items()}


class Model:
    """One tenant under a name of its own."""

    def __init__(
        self, engine: Engine, dump: Path, adapter: TenantConfig = ADAPTER, *, b_seed: int | None = None
    ) -> None:
        """`b_seed` fills every B with random numbers; without it they are 0, as in any fresh adapter."""
        self.id = f"model-{next(_NUMBERS)}"
        self._engine, self._dump = engine, dump
        self._steps = 0
        engine.create(self.id, adapter)
        if b_seed is not None:
            generator = torch.Generator().manual_seed(b_seed)
            self.set_weights(
                {
                    name: 0.02 * torch.randn(values.shape, generator=generator)
                    for name, values in self.weights().items()
                    if "lora_B" in name
                }
            )

    @property
    def tenant(self) -> Tenant:
        return self._engine.tenants.activate(self.id)

    def weights(self) -> Tensors:
        return {name: values.clone() for name, values in self.tenant.weights().items()}

    @torch.no_grad()
    def set_weights(self, weights: Tensors) -> None:
        own = self.tenant.weights()
        for name, values in weights.items():
            own[name].copy_(values)

    def window(self) -> list[Tensor]:
        """A copy of what the window has accumulated on this rank."""
        return [gradient.clone() for gradient in self.tenant.window.buffers()]

    def call(self, request: PackedRequest, label: int = 0) -> RequestOutput:
        """`forward_backward`, or `forward` when the request says so."""
        (outputs,) = self._engine.forward_backward(self.id, [request], [label])
        if isinstance(outputs, PassFailed):
            raise outputs
        return assemble(request, outputs)

    def step(
        self, adam: AdamParams | None = None, *, accept_lost: frozenset[int] = frozenset(), **fields: Any
    ) -> Step:
        """With `adam`, or the SDK's defaults; `fields` of it changed."""
        chosen = msgspec.structs.replace(adam or AdamParams(), **fields)
        report = self._engine.optim_step(self.id, chosen, accept_lost)
        dumped = dumps.read(self._dump, self.id, self._steps)
        self._steps += 1
        return Step(report, **dumped)


def assert_same_bits(found: Tensors, wanted: Tensors) -> None:
    """The same names and, element by element, the same numbers."""
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert torch.equal(found[name], values), name
