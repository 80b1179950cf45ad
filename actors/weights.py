"""Base weights between a Hugging Face folder of safetensors and a Megatron `GPTModel`.

Megatron fuses what Hugging Face keeps apart: q, k and v of each query group stand together in `linear_qkv`, gate
and up in `linear_fc1`. A rank takes its own rows or columns; layers are numbered over the whole pipeline.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from safetensors import safe_open
from torch import Tensor

from actors.models.spec import ModelSpec, UnsupportedModel

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


def fuse_qkv(q: Tensor, k: Tensor, v: Tensor, spec: ModelSpec) -> Tensor:
    """Rows of q, k and v, query group by query group, as Megatron's `linear_qkv` wants them."""
    groups = spec.num_query_groups
    parts = [t.reshape(groups, -1, *t.shape[1:]) for t in (q, k, v)]
    return torch.cat(parts, dim=1).reshape(-1, *q.shape[1:])


def split_qkv(qkv: Tensor, spec: ModelSpec) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of `fuse_qkv`."""
    per_group = spec.num_attention_heads // spec.num_query_groups
    grouped = qkv.reshape(spec.num_query_groups, (per_group + 2) * spec.head_dim, *qkv.shape[1:])
    q, k, v = grouped.split([per_group * spec.head_dim, spec.head_dim, spec.head_dim], dim=1)
    return tuple(t.reshape(-1, *qkv.shape[1:]) for t in (q, k, v))


def _mine(full: Tensor, dim: int) -> Tensor:
    """This tensor-parallel rank's slice."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    return full.chunk(size, dim=dim)[parallel_state.get_tensor_model_parallel_rank()]


def megatron_tensors(model: GPTModel, spec: ModelSpec, read: Read) -> Iterator[tuple[str, Tensor]]:
    """(Megatron parameter name, this rank's values) for every parameter of the rank's model."""
    vocab, hidden, ffn = spec.vocab_size, spec.hidden_size, spec.ffn_hidden_size
    heads, groups = spec.num_attention_heads * spec.head_dim, spec.num_query_groups * spec.head_dim
    if model.pre_process:
        yield "embedding.word_embeddings.weight", _mine(read("model.embed_tokens.weight", vocab, hidden), 0)
    for index, layer in enumerate(model.decoder.layers):
        hf = f"model.layers.{layer.layer_number - 1}"
        mine = f"decoder.layers.{index}"
        attention = f"{hf}.self_attn"
        kinds = {"weight": (hidden,), "bias": ()} if spec.qkv_bias else {"weight": (hidden,)}
        for kind, inputs in kinds.items():
            q = read(f"{attention}.q_proj.{kind}", heads, *inputs)
            k, v = (read(f"{attention}.{name}_proj.{kind}", groups, *inputs) for name in "kv")
            yield f"{mine}.self_attention.linear_qkv.{kind}", _mine(fuse_qkv(q, k, v, spec), 0)
        if spec.qk_norm:
            for name in "qk":
                norm = read(f"{attention}.{name}_norm.weight", spec.head_dim)
                yield f"{mine}.self_attention.{name}_layernorm.weight", norm
        proj = read(f"{attention}.o_proj.weight", hidden, heads)
        yield f"{mine}.self_attention.linear_proj.weight", _mine(proj, 1)
        yield f"{mine}.input_layernorm.weight", read(f"{hf}.input_layernorm.weight", hidden)
        yield f"{mine}.pre_mlp_layernorm.weight", read(f"{hf}.post_attention_layernorm.weight", hidden)
        gate, up = (_mine(read(f"{hf}.mlp.{name}_proj.weight", ffn, hidden), 0) for name in ("gate", "up"))
        yield f"{mine}.mlp.linear_fc1.weight", torch.cat([gate, up])
        yield f"{mine}.mlp.linear_fc2.weight", _mine(read(f"{hf}.mlp.down_proj.weight", hidden, ffn), 1)
    if model.post_process:
        yield "decoder.final_layernorm.weight", read("model.norm.weight", hidden)
        if not spec.tied_embeddings:
            yield "output_layer.weight", _mine(read("lm_head.weight", vocab, hidden), 0)
        elif not model.pre_process:
            yield "output_layer.weight", _mine(read("model.embed_tokens.weight", vocab, hidden), 0)


@torch.no_grad()
def load(model: GPTModel, spec: ModelSpec, folder: Path) -> None:
    """Set every parameter of this rank's model from the folder, in float32.

    Raises UnsupportedModel for a missing tensor or one of another shape; nothing is left unset.
    """
    parameters = dict(model.named_parameters())
    for name, values in megatron_tensors(model, spec, SafetensorsFolder(folder)):
        parameter = parameters.pop(name)
        if parameter.shape != values.shape:
            raise UnsupportedModel(
                f"{folder}: {name} should have shape {tuple(parameter.shape)}, the folder's has {tuple(values.shape)}"
            )
        parameter.copy_(values)
    if parameters:
        raise UnsupportedModel(f"{folder} sets no values for {', '.join(sorted(parameters))}")


def hugging_face_tensors(model: GPTModel, spec: ModelSpec) -> dict[str, Tensor]:
    """The inverse of `load` for a model that one rank holds whole: tensors under Hugging Face names."""
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    out = {
        "model.embed_tokens.weight": own["embedding.word_embeddings.weight"],
        "model.norm.weight": own["decoder.final_layernorm.weight"],
    }
    if not spec.tied_embeddings:
        out["lm_head.weight"] = own["output_layer.weight"]
    for index in range(spec.num_layers):
        hf, mine = f"model.layers.{index}", f"decoder.layers.{index}"
        for kind in ("weight", "bias") if spec.qkv_bias else ("weight",):
            parts = split_qkv(own[f"{mine}.self_attention.linear_qkv.{kind}"], spec)
            out |= {f"{hf}.self_attn.{n}_proj.{kind}": t for n, t in zip("qkv", parts, strict=True)}
        if spec.qk_norm:
            for n in "qk":
                out[f"{hf}.self_attn.{n}_norm.weight"] = own[f"{mine}.self_attention.{n}_layernorm.weight"]
        gate, up = own[f"{mine}.mlp.linear_fc1.weight"].chunk(2)
        out |= {
            f"{hf}.self_attn.o_proj.weight": own[f"{mine}.self_attention.linear_proj.weight"],
            f"{hf}.input_layernorm.weight": own[f"{mine}.input_layernorm.weight"],
            f"{hf}.post_attention_layernorm.weight": own[f"{mine}.pre_mlp_layernorm.weight"],
            f"{hf}.mlp.gate_proj.weight": gate,
            f"{hf}.mlp.up_proj.weight": up,
            f"{hf}.mlp.down_proj.weight": own[f"{mine}.mlp.linear_fc2.weight"],
        }
    return out
