"""Base weights between a Hugging Face folder of safetensors and a Megatron `GPTModel`.

Megatron fuses what Hugging Face keeps apart: q, k and v of each query group stand together in `linear_qkv`, gate
and up in `linear_fc1`. A rank takes its own rows, columns or experts; layers are numbered over the whole pipeline.
One table, `entries`, says it for both directions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from safetensors import safe_open
from torch import Tensor, nn

from actors.models.spec import ModelSpec, UnsupportedModel
from actors.shards import Shard, part

Read = Callable[..., Tensor]
"""Called with a Hugging Face name and the shape that the spec gives it."""


class SafetensorsFolder:
    """Tensors of a folder by name, one file or sharded; a file is opened when its first tensor is asked for."""

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            self._file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elif (folder / "model.safetensors").is_file():
            with safe_open(folder / "model.safetensors", framework="pt") as file:
                self._file_of = dict.fromkeys(file.keys(), "model.safetensors")
        else:
            raise UnsupportedModel(
                f"{folder} holds no weights: neither model.safetensors nor model.safetensors.index.json"
            )
        self._folder = folder
        self._open: dict[str, safe_open] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __call__(self, name: str, *shape: int) -> Tensor:
        """In float32. Raises UnsupportedModel when it is not there or has another shape."""
        if name not in self._file_of:
            raise UnsupportedModel(f"{self._folder} lacks the tensor {name!r}")
        file = self._file_of[name]
        if file not in self._open:
            self._open[file] = safe_open(self._folder / file, framework="pt")
        tensor: Tensor = self._open[file].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise UnsupportedModel(
                f"{self._folder}: {name} has shape {tuple(tensor.shape)}; by config.json it should be {shape}"
            )
        return tensor.float()


def fuse_qkv(q: Tensor, k: Tensor, v: Tensor, groups: int) -> Tensor:
    """Rows of q, k and v, query group by query group, as Megatron's `linear_qkv` wants them."""
    parts = [t.reshape(groups, -1, *t.shape[1:]) for t in (q, k, v)]
    return torch.cat(parts, dim=1).reshape(-1, *q.shape[1:])


def split_qkv(qkv: Tensor, spec: ModelSpec) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of `fuse_qkv`, for all query groups or a rank's."""
    per_group = spec.num_attention_heads // spec.num_query_groups
    grouped = qkv.reshape(-1, (per_group + 2) * spec.head_dim, *qkv.shape[1:])
    q, k, v = grouped.split([per_group * spec.head_dim, spec.head_dim, spec.head_dim], dim=1)
    return tuple(t.reshape(-1, *qkv.shape[1:]) for t in (q, k, v))


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the folder."""

    name: str
    shape: tuple[int, ...]
    split: int | None
    """The dimension that tensor-parallel ranks share out; None where each holds it whole."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One Megatron parameter and what it is made of."""

    parameter: str
    sources: tuple[Source, ...]
    join: Literal["one", "qkv", "stack"]


def _mlp(here: str, hf: str, hidden: int, ffn: int, *, split: bool) -> Iterator[Entry]:
    rows, columns = (0, 1) if split else (None, None)
    gate_up = tuple(Source(f"{hf}.{name}_proj.weight", (ffn, hidden), rows) for name in ("gate", "up"))
    yield Entry(f"{here}.linear_fc1.weight", gate_up, "stack")
    down = Source(f"{hf}.down_proj.weight", (hidden, ffn), columns)
    yield Entry(f"{here}.linear_fc2.weight", (down,), "one")


def entries(model: GPTModel, spec: ModelSpec) -> Iterator[Entry]:
    """Every parameter of this rank's model chunk."""
    vocab, hidden = spec.vocab_size, spec.hidden_size
    heads, groups = spec.num_attention_heads * spec.head_dim, spec.num_query_groups * spec.head_dim

    def one(parameter: str, name: str, shape: tuple[int, ...], split: int | None = None) -> Entry:
        return Entry(parameter, (Source(name, shape, split),), "one")

    embedding = "model.embed_tokens.weight"
    if model.pre_process:
        yield one("embedding.word_embeddings.weight", embedding, (vocab, hidden), 0)
    for index, layer in enumerate(model.decoder.layers):
        here, hf = f"decoder.layers.{index}", f"model.layers.{layer.layer_number - 1}"
        for kind in ("weight", "bias") if spec.qkv_bias else ("weight",):
            inputs = (hidden,) if kind == "weight" else ()
            sources = tuple(
                Source(f"{hf}.self_attn.{name}_proj.{kind}", (rows, *inputs), 0)
                for name, rows in (("q", heads), ("k", groups), ("v", groups))
            )
            yield Entry(f"{here}.self_attention.linear_qkv.{kind}", sources, "qkv")
        if spec.qk_norm:
            for name in "qk":
                ours = f"{here}.self_attention.{name}_layernorm.weight"
                yield one(ours, f"{hf}.self_attn.{name}_norm.weight", (spec.head_dim,))
        proj = f"{here}.self_attention.linear_proj.weight"
        yield one(proj, f"{hf}.self_attn.o_proj.weight", (hidden, heads), 1)
        yield one(f"{here}.input_layernorm.weight", f"{hf}.input_layernorm.weight", (hidden,))
        yield one(f"{here}.pre_mlp_layernorm.weight", f"{hf}.post_attention_layernorm.weight", (hidden,))
        if spec.moe is None:
            yield from _mlp(f"{here}.mlp", f"{hf}.mlp", hidden, spec.ffn_hidden_size, split=True)
            continue
        yield one(f"{here}.mlp.router.weight", f"{hf}.mlp.gate.weight", (spec.moe.num_experts, hidden))
        for local, number in enumerate(layer.mlp.local_expert_indices):
            ours, theirs = f"{here}.mlp.experts.local_experts.{local}", f"{hf}.mlp.experts.{number}"
            yield from _mlp(ours, theirs, hidden, spec.moe.ffn_hidden_size, split=False)
    if model.post_process:
        yield one("decoder.final_layernorm.weight", "model.norm.weight", (hidden,))
        if not spec.tied_embeddings:
            yield one("output_layer.weight", "lm_head.weight", (vocab, hidden), 0)
        elif not model.pre_process:
            yield one("output_layer.weight", embedding, (vocab, hidden), 0)


def mine(full: Tensor, split: int | None) -> Tensor:
    """This tensor-parallel rank's slice; where the ranks do not divide the rows, the last ones are zero."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    return part(full, split, parallel_state.get_tensor_model_parallel_rank(), size)


def joined(how: str, parts: Sequence[Tensor], spec: ModelSpec) -> Tensor:
    """A Megatron parameter from this rank's parts of its sources."""
    if how == "one":
        return parts[0]
    if how == "stack":
        return torch.cat(list(parts))
    groups = spec.num_query_groups // parallel_state.get_tensor_model_parallel_world_size()
    return fuse_qkv(parts[0], parts[1], parts[2], groups)


def parted(entry: Entry, values: Tensor, spec: ModelSpec) -> Sequence[Tensor]:
    """The inverse of `joined`, for whatever is shaped like the parameter."""
    if entry.join == "one":
        return (values,)
    return values.chunk(len(entry.sources)) if entry.join == "stack" else split_qkv(values, spec)


def from_whole(model: GPTModel, spec: ModelSpec, read: Read) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Every parameter of this rank's model chunk with what is read for it: the inverse of `shards`.

    Raises UnsupportedModel, at the end, for parameters that nothing was read for.
    """
    parameters = dict(model.named_parameters())
    for entry in entries(model, spec):
        parts = [mine(read(source.name, *source.shape), source.split) for source in entry.sources]
        yield parameters.pop(entry.parameter), joined(entry.join, parts, spec)
    if parameters:
        raise UnsupportedModel(f"nothing sets {', '.join(sorted(parameters))}")


@torch.no_grad()
def load(model: GPTModel, spec: ModelSpec, folder: Path) -> None:
    """Set every parameter of this rank's model chunk from the folder, in the parameter's dtype.

    Raises UnsupportedModel for a missing tensor or one of another shape; nothing is left unset.
    """
    for parameter, found in from_whole(model, spec, SafetensorsFolder(folder)):
        parameter.copy_(found)


def shards(model: GPTModel, spec: ModelSpec, tensor_of: Callable[[nn.Parameter], Tensor]) -> Iterator[Shard]:
    """This rank's part of every tensor of the chunk, under Hugging Face names.

    `tensor_of` gives what is wanted of a parameter: its weight, its gradient, a moment of it.
    """
    parameters = dict(model.named_parameters())
    for entry in entries(model, spec):
        held = tensor_of(parameters[entry.parameter])
        for source, piece in zip(entry.sources, parted(entry, held, spec), strict=True):
            size = None if source.split is None else source.shape[source.split]
            yield Shard(source.name, piece, source.split, size)


def hugging_face_tensors(model: GPTModel, spec: ModelSpec) -> dict[str, Tensor]:
    """The inverse of `load` for a model that one rank holds whole: tensors under Hugging Face names."""
    return {shard.name: shard.tensor for shard in shards(model, spec, lambda parameter: parameter.detach())}
