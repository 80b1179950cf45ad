"""Qwen3 with experts: the dense model's attention, and a router and experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actors.models.spec import ModelSpec, MoeSpec, UnsupportedModel, common_spec

ARCHITECTURES = ("Qwen3MoeForCausalLM",)


def spec(config: Mapping[str, Any]) -> ModelSpec:
    if config.get("attention_bias"):
        raise UnsupportedModel("config.json sets attention_bias; Qwen3 folders with biases are not supported")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise UnsupportedModel(
            "config.json has layers without experts (mlp_only_layers, decoder_sparse_step); "
            "only models with experts in every layer are supported"
        )
    missing = [name for name in ("moe_intermediate_size", "num_experts_per_tok") if config.get(name) is None]
    # transformers renamed it; folders hold either.
    num_experts = config.get("num_experts", config.get("num_local_experts"))
    if num_experts is None:
        missing.append("num_experts")
    if missing:
        raise UnsupportedModel(f"config.json does not set {', '.join(missing)}")
    moe = MoeSpec(
        num_experts=num_experts,
        ffn_hidden_size=config["moe_intermediate_size"],
        top_k=config["num_experts_per_tok"],
        normalized=bool(config.get("norm_topk_prob", False)),
    )
    return common_spec(config, "qwen3_moe", qk_norm=True, qkv_bias=False, moe=moe)
