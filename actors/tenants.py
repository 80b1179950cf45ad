"""The models that train on one base: adapters over it or a full copy, each with a gradient window and an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn

from actors import optimizer as adamw
from actors import weights
from actors.contract import FullConfig, TenantConfig
from actors.layout import Layout
from actors.lora import AdapterHost, AdapterSet
from actors.models.build import LogprobModel
from actors.models.spec import ModelSpec
from actors.shards import Shard
from actors.transforms.fake_int4 import FakeInt4
from actors.transforms.model import QuantizedWeights
from actors.window import Window


@dataclass(slots=True)
class Tenant:
    """One model that is in memory."""

    model_id: str
    config: TenantConfig
    chunks: Sequence[LogprobModel]
    """What a pass runs: the base model's chunks, or the tenant's own."""
    trained: Sequence[nn.Module]
    """What it trains, chunk by chunk: adapter sets, or the chunks themselves."""
    spec: ModelSpec
    ddps: Sequence[DistributedDataParallel]
    optimizer: MegatronOptimizer
    window: Window
    quantized: QuantizedWeights | None = None
    """Of a model that trains under fake INT4; a frozen base has the values in its weights."""
    steps: int = 0
    """Optimizer steps asked for, skipped ones included."""

    def shards(self, tensor_of: Callable[[nn.Parameter], Tensor]) -> list[Shard]:
        """This rank's part of whatever `tensor_of` gives for a trained parameter, under PEFT's or HF's names."""
        found: list[Shard] = []
        for module in self.trained:
            if isinstance(module, AdapterSet):
                found.extend(module.shards(tensor_of))
            else:
                found.extend(weights.shards(module, self.spec, tensor_of))
        return found

    def from_whole(self, read: weights.Read) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Every trained parameter with this rank's part of what `read` has: the inverse of `shards`."""
        for module in self.trained:
            if isinstance(module, AdapterSet):
                yield from module.from_whole(read)
            else:
                yield from weights.from_whole(module, self.spec, read)

    def weights(self) -> dict[str, Tensor]:
        """This rank's part of the trained weights."""
        return {shard.name: shard.tensor for shard in self.shards(lambda parameter: parameter.detach())}


class Tenants:
    """Who is in memory, and who is active."""

    def __init__(
        self,
        base: Sequence[LogprobModel],
        spec: ModelSpec,
        layout: Layout,
        new_base: Callable[[], list[LogprobModel]],
        fake_int4: FakeInt4 | None = None,
    ) -> None:
        """`new_base` makes another copy of the base model, for a tenant to train; `base` is frozen."""
        self._base, self._spec, self._layout, self._new_base = base, spec, layout, new_base
        self._fake_int4 = fake_int4
        self._hosts = [AdapterHost(chunk, spec) for chunk in base]
        self._by_id: dict[str, Tenant] = {}

    def __contains__(self, model_id: str) -> bool:
        return model_id in self._by_id

    def __len__(self) -> int:
        return len(self._by_id)

    def create(self, model_id: str, config: TenantConfig) -> Tenant:
        """A fresh model: computes what the base computes until its first step."""
        chunks: Sequence[LogprobModel]
        trained: Sequence[nn.Module]
        quantized: QuantizedWeights | None = None
        if isinstance(config, FullConfig):
            chunks = trained = self._new_base()
            if self._fake_int4 is not None:
                quantized = QuantizedWeights(chunks, self._spec, self._fake_int4)
        else:
            chunks = self._base
            trained = [AdapterSet(chunk, self._spec, config) for chunk in self._base]
        modules: list[nn.Module] = list(trained)
        ddps = [self._wrapped(module, number) for number, module in enumerate(modules)]
        optimizer = adamw.build(ddps, distributed=self._layout.distributed_optimizer)
        overlap = self._layout.overlap_grad_reduce
        window = Window(ddps, overlap=overlap)
        tenant = Tenant(model_id, config, chunks, trained, self._spec, ddps, optimizer, window, quantized)
        self._by_id[model_id] = tenant
        return tenant

    def _wrapped(self, module: nn.Module, number: int) -> DistributedDataParallel:
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=self._layout.overlap_grad_reduce,
            use_distributed_optimizer=self._layout.distributed_optimizer,
        )
        return DistributedDataParallel(self._base[0].config, config, module, disable_bucketing=number > 0)

    def activate(self, model_id: str) -> Tenant:
        """The tenant, its adapters now in the forward pass. KeyError when it is not in memory."""
        tenant = self._by_id[model_id]
        for host, module in zip(self._hosts, tenant.trained, strict=True):
            host.active = module if isinstance(module, AdapterSet) else None
        return tenant

    def drop(self, model_id: str) -> None:
        """Forget a tenant and free its memory."""
        tenant = self._by_id.pop(model_id)
        for host, module in zip(self._hosts, tenant.trained, strict=True):
            if host.active is module:
                host.active = None
            for parameter in module.parameters():
                parameter.grad = None
                parameter.main_grad = None  # type: ignore[attr-defined]
        with torch.no_grad():
            for ddp in tenant.ddps:
                ddp.grad_accs.clear()
