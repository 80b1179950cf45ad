"""The models that train on one base: each an adapter set with a gradient window and an optimizer of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from actors import optimizer as adamw
from actors.layout import Layout
from actors.lora import AdapterConfig, AdapterHost, AdapterSet
from actors.models.spec import ModelSpec
from actors.window import Window


@dataclass(slots=True)
class Tenant:
    """One model that is in memory."""

    model_id: str
    adapters: AdapterSet
    ddp: DistributedDataParallel
    optimizer: MegatronOptimizer
    window: Window
    steps: int = 0
    """Optimizer steps asked for, skipped ones included."""

    def weights(self) -> dict[str, Tensor]:
        """This rank's adapter weights under PEFT's names."""
        return self.adapters.peft_tensors(lambda parameter: parameter.detach())


class Tenants:
    """Who is in memory, and who is active."""

    def __init__(self, model: GPTModel, spec: ModelSpec, layout: Layout) -> None:
        self._model, self._spec, self._layout = model, spec, layout
        self._host = AdapterHost(model, spec)
        self._by_id: dict[str, Tenant] = {}

    def __contains__(self, model_id: str) -> bool:
        return model_id in self._by_id

    def __len__(self) -> int:
        return len(self._by_id)

    def create(self, model_id: str, config: AdapterConfig) -> Tenant:
        """A fresh adapter, neutral until its first step."""
        adapters = AdapterSet(self._model, self._spec, config)
        ddp = DistributedDataParallel(
            self._model.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=False,
                use_distributed_optimizer=self._layout.distributed_optimizer,
            ),
            adapters,
        )
        optimizer = adamw.build(ddp, distributed=self._layout.distributed_optimizer)
        tenant = Tenant(model_id, adapters, ddp, optimizer, Window(ddp))
        self._by_id[model_id] = tenant
        return tenant

    def activate(self, model_id: str) -> Tenant:
        """The tenant, its adapters now in the forward pass. KeyError when it is not in memory."""
        tenant = self._by_id[model_id]
        self._host.active = tenant.adapters
        return tenant

    def drop(self, model_id: str) -> None:
        """Forget a tenant and free its memory."""
        tenant = self._by_id.pop(model_id)
        if self._host.active is tenant.adapters:
            self._host.active = None
        for parameter in tenant.adapters.parameters():
            parameter.grad = None
            parameter.main_grad = None  # type: ignore[attr-defined]
        with torch.no_grad():
            tenant.ddp.grad_accs.clear()
