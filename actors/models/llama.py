"""Llama and what shares its shape (SmolLM2, TinyLlama): no q/k norms, no biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actors.models.spec import ModelSpec, UnsupportedModel, common_spec

ARCHITECTURES = ("LlamaForCausalLM",)


def spec(config: Mapping[str, Any]) -> ModelSpec:
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name):
            raise UnsupportedModel(f"config.json sets {name}; Llama folders with biases are not supported")
    return common_spec(config, "llama", qk_norm=False, qkv_bias=False)
