"""LoRA adapters on Megatron's parallel linears, equal to PEFT's: `scale · B(A(x))` added to the output.

Where Megatron fuses several of PEFT's layers into one (q, k, v; gate, up), each keeps an A and a B of its own; the
As are stacked, so that one product serves them all. A's initial values depend on (seed, PEFT parameter name)
alone, so every layout starts from the same adapter; B starts at 0, so a fresh adapter changes nothing.

Tensor parallelism: column-parallel layers replicate A and split B by rows; row-parallel ones split A by columns
and replicate B.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor, nn

from actors import device
from actors.models.spec import ModelSpec


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
class Target:
    """One Megatron linear and the PEFT layers it stands for."""

    path: str
    """Where the linear is in this rank's `GPTModel`."""
    names: tuple[str, ...]
    """PEFT's layers, in the order of the fused output."""
    in_features: int
    out_features: tuple[int, ...]
    """Whole sizes, before any split over ranks."""
    split: str
    """"rows" for a column-parallel linear, "columns" for a row-parallel one."""
    groups: int = 1
    """The fused outputs stand group by group, each group holding a slice of every part (query groups)."""


def targets(model: GPTModel, spec: ModelSpec, config: AdapterConfig) -> Iterator[Target]:
    """The linears of this rank's model that the adapter touches."""
    heads, groups = spec.num_attention_heads * spec.head_dim, spec.num_query_groups * spec.head_dim
    hidden, ffn = spec.hidden_size, spec.ffn_hidden_size
    for index, layer in enumerate(model.decoder.layers):
        here, hf = f"decoder.layers.{index}", f"model.layers.{layer.layer_number - 1}"
        if config.train_attn:
            qkv = tuple(f"{hf}.self_attn.{n}_proj" for n in "qkv")
            path = f"{here}.self_attention.linear_qkv"
            yield Target(path, qkv, hidden, (heads, groups, groups), "rows", groups=spec.num_query_groups)
            proj = f"{hf}.self_attn.o_proj"
            yield Target(f"{here}.self_attention.linear_proj", (proj,), heads, (hidden,), "columns")
        if config.train_mlp:
            gate_up = (f"{hf}.mlp.gate_proj", f"{hf}.mlp.up_proj")
            yield Target(f"{here}.mlp.linear_fc1", gate_up, hidden, (ffn, ffn), "rows")
            yield Target(f"{here}.mlp.linear_fc2", (f"{hf}.mlp.down_proj",), ffn, (hidden,), "columns")
    if config.train_unembed and model.post_process:
        yield Target("output_layer", ("lm_head",), hidden, (spec.vocab_size,), "rows")


def initial_a(name: str, seed: int, rank: int, in_features: int) -> Tensor:
    """PEFT's initial A, Kaiming-uniform with a = √5, i.e. U(−1/√in, 1/√in); (rank, in_features), float32.

    The generator's seed is a hash of (seed, name), so neither layout nor order of construction matters.
    """
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") & (2**63 - 1))
    bound = 1 / math.sqrt(in_features)
    return torch.empty(rank, in_features).uniform_(-bound, bound, generator=generator)


class Adapter(nn.Module):
    """The adapter of one Megatron linear: stacked As, one B a PEFT layer."""

    def __init__(self, target: Target, config: AdapterConfig) -> None:
        super().__init__()
        self.target = target
        self.rank = config.rank
        self.scale = config.scale
        tp = parallel_state.get_tensor_model_parallel_world_size()
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        by_rows = target.split == "rows"
        stacked = [
            initial_a(f"{name}.lora_A.weight", config.seed, config.rank, target.in_features)
            for name in target.names
        ]
        A = torch.cat(stacked)
        if not by_rows:
            A = A.chunk(tp, dim=1)[tp_rank].contiguous()
        self.A = nn.Parameter(A.to(device.device()))
        self.B = nn.ParameterList(
            nn.Parameter(torch.zeros(size // tp if by_rows else size, config.rank, device=device.device()))
            for size in target.out_features
        )
        for parameter, split in ((self.A, not by_rows), *((b, by_rows) for b in self.B)):
            parameter.tensor_model_parallel = split
            parameter.partition_dim = (0 if by_rows else 1) if split else -1
            parameter.partition_stride = 1

    def forward(self, x: Tensor, out: Tensor) -> Tensor:
        """`out` plus this adapter's share. x: (S, B, in of this rank); out: (S, B, out of this rank)."""
        u = torch.nn.functional.linear(x.reshape(-1, x.shape[-1]), self.A)
        if self.target.split == "rows":
            u = copy_to_tensor_model_parallel_region(u)
        else:
            u = reduce_from_tensor_model_parallel_region(u)
        if len(self.B) == 1:
            flat = torch.addmm(out.reshape(-1, out.shape[-1]), u, self.B[0].t(), alpha=self.scale)
            return flat.view(out.shape)
        parts = [
            torch.nn.functional.linear(u_p, b)
            for u_p, b in zip(u.split(self.rank, dim=-1), self.B, strict=True)
        ]
        groups = self.target.groups // parallel_state.get_tensor_model_parallel_world_size() or 1
        grouped = torch.cat([p.view(p.shape[0], groups, -1) for p in parts], dim=-1)
        return torch.add(out, grouped.view(out.shape), alpha=self.scale)

    def peft_tensors(self, tensor_of: Callable[[nn.Parameter], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(PEFT name, values) of whatever `tensor_of` gives for a parameter: its weight, gradient, moments."""
        for name, a in zip(self.target.names, tensor_of(self.A).split(self.rank), strict=True):
            yield f"{name}.lora_A.weight", a
        for name, b in zip(self.target.names, self.B, strict=True):
            yield f"{name}.lora_B.weight", tensor_of(b)


class AdapterSet(nn.ModuleDict):
    """All adapters of one tenant on this rank. A container of its own, so that it has its own gradient buffer."""

    share_embeddings_and_output_weights = False  # asked for by Megatron's finalize_model_grads

    def __init__(self, model: GPTModel, spec: ModelSpec, config: AdapterConfig) -> None:
        self.by_path = {t.path: Adapter(t, config) for t in targets(model, spec, config)}
        super().__init__({path.replace(".", "/"): adapter for path, adapter in self.by_path.items()})
        self.config = model.config
        self.pre_process, self.post_process = model.pre_process, model.post_process

    def peft_tensors(self, tensor_of: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
        """Every adapter's tensors under PEFT's names."""
        return dict(pair for adapter in self.by_path.values() for pair in adapter.peft_tensors(tensor_of))


class AdapterHost:
    """Puts the active tenant's adapters into the base model's forward pass. Switching copies nothing."""

    def __init__(self, model: GPTModel, spec: ModelSpec) -> None:
        self.active: AdapterSet | None = None
        everything = AdapterConfig(rank=1, alpha=1.0, seed=0)
        for target in targets(model, spec, everything):
            model.get_submodule(target.path).register_forward_hook(self._hook(target.path))

    def _hook(self, path: str) -> Callable[..., tuple[Tensor, Tensor | None] | None]:
        def add_adapter(
            module: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]
        ) -> tuple[Tensor, Tensor | None] | None:
            adapter = self.active.by_path.get(path) if self.active is not None else None
            if adapter is None:
                return None
            out, bias = output
            return adapter(args[0], out), bias

        return add_adapter
