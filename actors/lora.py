"""LoRA adapters on Megatron's parallel linears, equal to PEFT's: `scale · B(A(x))` added to the output.

Where Megatron fuses several of PEFT's layers into one (q, k, v; gate, up), each keeps an A and a B of its own; the
As are stacked, so that one product serves them all. A's initial values depend on (seed, PEFT parameter name)
alone, so every layout starts from the same adapter; B starts at 0, so a fresh adapter changes nothing.

Tensor parallelism: column-parallel layers replicate A and split B by rows; row-parallel ones split A by columns
and replicate B. With sequence parallelism a replicated half sees a part of the sequence on each rank, so Megatron
sums its gradient over them. Experts are whole on their rank, and so are their adapters.

A and B are float32, and so are their gradients and their optimizer, whatever the base model's dtype; their products
are computed in the dtype of what they adapt.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from actors import device
from actors.contract import AdapterConfig
from actors.models.spec import ModelSpec
from actors.shards import Shard
from actors.weights import mine


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
    split: Literal["rows", "columns", "nothing"]
    """"rows" for a column-parallel linear, "columns" for a row-parallel one, "nothing" for an expert's."""
    groups: int = 1
    """The fused outputs stand group by group, each group holding a slice of every part (query groups)."""


def targets(model: GPTModel, spec: ModelSpec, config: AdapterConfig) -> Iterator[Target]:
    """The linears of this rank's model chunk that the adapter touches."""
    heads, groups = spec.num_attention_heads * spec.head_dim, spec.num_query_groups * spec.head_dim
    hidden = spec.hidden_size

    def mlp(here: str, hf: str, ffn: int, *, expert: bool) -> Iterator[Target]:
        gate_up = (f"{hf}.gate_proj", f"{hf}.up_proj")
        yield Target(f"{here}.linear_fc1", gate_up, hidden, (ffn, ffn), "nothing" if expert else "rows")
        down = (f"{hf}.down_proj",)
        yield Target(f"{here}.linear_fc2", down, ffn, (hidden,), "nothing" if expert else "columns")

    for index, layer in enumerate(model.decoder.layers):
        here, hf = f"decoder.layers.{index}", f"model.layers.{layer.layer_number - 1}"
        if config.train_attn:
            qkv = tuple(f"{hf}.self_attn.{n}_proj" for n in "qkv")
            path = f"{here}.self_attention.linear_qkv"
            yield Target(path, qkv, hidden, (heads, groups, groups), "rows", groups=spec.num_query_groups)
            proj = f"{hf}.self_attn.o_proj"
            yield Target(f"{here}.self_attention.linear_proj", (proj,), heads, (hidden,), "columns")
        if config.train_mlp and spec.moe is None:
            yield from mlp(f"{here}.mlp", f"{hf}.mlp", spec.ffn_hidden_size, expert=False)
        elif config.train_mlp and spec.moe is not None:
            for local, number in enumerate(layer.mlp.local_expert_indices):
                ours, theirs = f"{here}.mlp.experts.local_experts.{local}", f"{hf}.mlp.experts.{number}"
                yield from mlp(ours, theirs, spec.moe.ffn_hidden_size, expert=True)
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

    def __init__(self, target: Target, config: AdapterConfig, *, sequence_parallel: bool) -> None:
        super().__init__()
        self.target = target
        self.rank = config.rank
        self.scale = config.scale
        self.sequence_parallel = sequence_parallel
        tp = parallel_state.get_tensor_model_parallel_world_size()
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        by_rows, by_columns = target.split == "rows", target.split == "columns"
        stacked = [
            initial_a(f"{name}.lora_A.weight", config.seed, config.rank, target.in_features)
            for name in target.names
        ]
        A = torch.cat(stacked)
        if by_columns:
            A = A.chunk(tp, dim=1)[tp_rank].contiguous()
        self.A = nn.Parameter(A.to(device.device()))
        # Rounded up where the ranks do not divide the rows: a vocabulary's padding, which no gradient reaches.
        self.B = nn.ParameterList(
            nn.Parameter(
                torch.zeros(-(-size // tp) if by_rows else size, config.rank, device=device.device())
            )
            for size in target.out_features
        )
        for parameter, split in ((self.A, by_columns), *((b, by_rows) for b in self.B)):
            parameter.tensor_model_parallel = split
            parameter.partition_dim = (0 if by_rows else 1) if split else -1
            parameter.partition_stride = 1
            parameter.sequence_parallel = sequence_parallel and not split
            if target.split == "nothing" and parallel_state.get_expert_model_parallel_world_size() > 1:
                # Its gradient is summed over the ranks that hold this expert, not over all data-parallel ones,
                # and it counts in the norm on whichever rank holds it.
                parameter.allreduce = False
                parameter.tensor_model_parallel = True
                parameter.sequence_parallel = False

    def low(self, x: Tensor) -> Tensor:
        """A(x) with one row for each row of the output. x: (S, B, in) or (T, in)."""
        u = torch.nn.functional.linear(x, self.A.to(x.dtype))
        match self.target.split, self.sequence_parallel:
            case "rows", True:
                return gather_from_sequence_parallel_region(u)
            case "rows", False:
                return copy_to_tensor_model_parallel_region(u)
            case "columns", True:
                return reduce_scatter_to_sequence_parallel_region(u)
            case "columns", False:
                return reduce_from_tensor_model_parallel_region(u)
        return u

    def forward(self, x: Tensor, out: Tensor) -> Tensor:
        """`out` plus this adapter's share. x: (…, in of this rank); out: (…, out of this rank)."""
        u = self.low(x).flatten(0, -2)
        if len(self.B) == 1:
            flat = torch.addmm(out.flatten(0, -2), u, self.B[0].to(u.dtype).t(), alpha=self.scale)
            return flat.view(out.shape)
        parts = [
            torch.nn.functional.linear(u_p, b.to(u_p.dtype))
            for u_p, b in zip(u.split(self.rank, dim=-1), self.B, strict=True)
        ]
        groups = self.target.groups // parallel_state.get_tensor_model_parallel_world_size() or 1
        # Sizes in full: an expert may see no token at all.
        grouped = torch.cat([p.view(p.shape[0], groups, p.shape[1] // groups) for p in parts], dim=-1)
        return torch.add(out, grouped.view(out.shape), alpha=self.scale)

    def shards(self, tensor_of: Callable[[nn.Parameter], Tensor]) -> Iterator[Shard]:
        """This rank's part of whatever `tensor_of` gives for a parameter, under PEFT's names."""
        columns = self.target.in_features if self.target.split == "columns" else None
        split = None if columns is None else 1
        for name, a in zip(self.target.names, tensor_of(self.A).split(self.rank), strict=True):
            yield Shard(f"{name}.lora_A.weight", a, split, columns)
        by_rows = self.target.split == "rows"
        for name, b, size in zip(self.target.names, self.B, self.target.out_features, strict=True):
            rows = size if by_rows else None
            yield Shard(f"{name}.lora_B.weight", tensor_of(b), 0 if by_rows else None, rows)

    def from_whole(self, read: Callable[..., Tensor]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Every parameter with this rank's part of what `read` has under PEFT's names: the inverse of `shards`."""
        split = 1 if self.target.split == "columns" else None
        names, sizes = self.target.names, self.target.out_features
        stacked = [read(f"{name}.lora_A.weight", self.rank, self.target.in_features) for name in names]
        yield self.A, torch.cat([mine(a, split) for a in stacked])
        split = 0 if self.target.split == "rows" else None
        for name, b, size in zip(names, self.B, sizes, strict=True):
            yield b, mine(read(f"{name}.lora_B.weight", size, self.rank), split)


class AdapterSet(nn.ModuleDict):
    """One tenant's adapters of a model chunk. A container of its own, so that it has its own gradient buffer."""

    share_embeddings_and_output_weights = False  # asked for by Megatron's finalize_model_grads

    def __init__(self, model: GPTModel, spec: ModelSpec, config: AdapterConfig) -> None:
        sequence_parallel = model.config.sequence_parallel
        self.by_path = {
            t.path: Adapter(t, config, sequence_parallel=sequence_parallel)
            for t in targets(model, spec, config)
        }
        super().__init__({path.replace(".", "/"): adapter for path, adapter in self.by_path.items()})
        self.config = model.config
        self.pre_process, self.post_process = model.pre_process, model.post_process

    def shards(self, tensor_of: Callable[[nn.Parameter], Tensor]) -> Iterator[Shard]:
        """Every adapter's tensors under PEFT's names."""
        for adapter in self.by_path.values():
            yield from adapter.shards(tensor_of)

    def from_whole(self, read: Callable[..., Tensor]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Every adapter's parameters with what `read` has for them."""
        for adapter in self.by_path.values():
            yield from adapter.from_whole(read)


class AdapterHost:
    """Puts the active tenant's adapters into a base model chunk's forward pass. Switching copies nothing."""

    def __init__(self, model: GPTModel, spec: ModelSpec) -> None:
        self.active: AdapterSet | None = None
        model.head_adapter = lambda: self._adapter("output_layer")  # of a fused head, which calls no linear
        everything = AdapterConfig(rank=1, alpha=1.0, seed=0)
        for target in targets(model, spec, everything):
            model.get_submodule(target.path).register_forward_hook(self._hook(target.path))

    def _adapter(self, path: str) -> Adapter | None:
        return self.active.by_path.get(path) if self.active is not None else None

    def _hook(self, path: str) -> Callable[..., tuple[Tensor, Tensor | None] | None]:
        def add_adapter(
            module: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]
        ) -> tuple[Tensor, Tensor | None] | None:
            adapter = self._adapter(path)
            if adapter is None:
                return None
            out, bias = output
            return adapter(args[0], out), bias

        return add_adapter
