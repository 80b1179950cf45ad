"""What a model's configuration alone says of a weight transform: refused here, before anything is started. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from actors.models.spec import ModelSpec
from actors.transforms.fake_int4 import FakeInt4, check_tp_alignment, matches


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer, by its Hugging Face name."""

    name: str
    in_features: int
    split_inputs: bool
    """Whether tensor-parallel ranks share out its input features."""


def linears(spec: ModelSpec) -> Iterator[Linear]:
    """Every linear layer of the model. A tied head is the embedding, and no linear of its own."""
    hidden = spec.hidden_size
    for layer in range(spec.num_layers):
        here = f"model.layers.{layer}"
        for name in "qkv":
            yield Linear(f"{here}.self_attn.{name}_proj", hidden, False)
        yield Linear(f"{here}.self_attn.o_proj", spec.num_attention_heads * spec.head_dim, True)
        if spec.moe is None:
            mlps, ffn = [f"{here}.mlp"], spec.ffn_hidden_size
        else:
            yield Linear(f"{here}.mlp.gate", hidden, False)
            mlps = [f"{here}.mlp.experts.{number}" for number in range(spec.moe.num_experts)]
            ffn = spec.moe.ffn_hidden_size
        for mlp in mlps:
            yield Linear(f"{mlp}.gate_proj", hidden, False)
            yield Linear(f"{mlp}.up_proj", hidden, False)
            yield Linear(f"{mlp}.down_proj", ffn, spec.moe is None)
    if not spec.tied_embeddings:
        yield Linear("lm_head", hidden, False)


def touched(config: FakeInt4, spec: ModelSpec) -> list[Linear]:
    """The linears that the transform is for."""
    return [linear for linear in linears(spec) if matches(config, linear.name)]


def check(config: FakeInt4, spec: ModelSpec, tp: int) -> None:
    """Raises ValueError, in one sentence, where the transform cannot work on this model and layout."""
    found = touched(config, spec)
    if not found:
        raise ValueError(
            f"fake_int4.modules is {list(config.modules)}, which names no linear layer of this model; "
            f"its layers are named like {next(linears(spec)).name!r}"
        )
    for linear in found:
        if linear.split_inputs:
            check_tp_alignment(linear.in_features, tp, config.group_size, linear.name)
