"""What every supported base model has in common, read from a Hugging Face `config.json`.

A family (one file beside this) turns its config into a `ModelSpec` and refuses by name what it cannot honour.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class UnsupportedModel(ValueError):
    """A folder this release cannot train; the message names the setting and what would work."""


REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
    "max_position_embeddings",
)
"""Without a default that every family shares."""


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Experts in the place of every layer's MLP. Routing is dropless and without auxiliary losses."""

    num_experts: int
    ffn_hidden_size: int
    """Of one expert."""
    top_k: int
    """Experts of each token."""
    normalized: bool
    """The chosen experts' probabilities are divided by their sum."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder of RMSNorm, rotary attention with grouped queries, and a SwiGLU MLP or experts."""

    family: str
    vocab_size: int
    hidden_size: int
    ffn_hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    context_length: int
    tied_embeddings: bool
    qk_norm: bool
    qkv_bias: bool
    moe: MoeSpec | None = None


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`. Raises UnsupportedModel when there is none."""
    path = folder / "config.json"
    if not path.is_file():
        raise UnsupportedModel(f"{folder} is not a Hugging Face model folder: it has no config.json")
    config: dict[str, Any] = json.loads(path.read_text())
    return config


def rope_theta(config: Mapping[str, Any]) -> float:
    """The rotary base; both places that transformers has kept it in. Scaled rotary embeddings are refused."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise UnsupportedModel(
            f"config.json asks for rope_type {kind!r}; this release computes the default rotary embedding only"
        )
    return float(parameters.get("rope_theta", config.get("rope_theta", 10_000.0)))


def common_spec(
    config: Mapping[str, Any], family: str, *, qk_norm: bool, qkv_bias: bool, moe: MoeSpec | None = None
) -> ModelSpec:
    """The fields that all families name alike, after refusing what no family here honours."""
    missing = [name for name in REQUIRED if config.get(name) is None]
    if missing:
        raise UnsupportedModel(f"config.json does not set {', '.join(missing)}")
    if config.get("quantization_config"):
        raise UnsupportedModel(
            "config.json has a quantization_config; only unquantized weights are supported"
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"config.json has hidden_act {activation!r}; only 'silu' is supported")
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        raise UnsupportedModel(
            "config.json asks for sliding-window attention; only full attention is supported"
        )
    if config.get("attention_dropout", 0.0):
        raise UnsupportedModel(
            f"config.json has attention_dropout {config['attention_dropout']}; set it to 0, nothing here is random"
        )
    heads = config["num_attention_heads"]
    return ModelSpec(
        family=family,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_attention_heads=heads,
        num_query_groups=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        rms_norm_eps=config["rms_norm_eps"],
        rope_theta=rope_theta(config),
        context_length=config["max_position_embeddings"],
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        moe=moe,
    )
