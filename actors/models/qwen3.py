"""Qwen3 (dense): RMS norms on every query and key head, no biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actors.models.spec import ModelSpec, UnsupportedModel, common_spec

ARCHITECTURES = ("Qwen3ForCausalLM",)


def spec(config: Mapping[str, Any]) -> ModelSpec:
    if config.get("attention_bias"):
        raise UnsupportedModel("config.json sets attention_bias; Qwen3 folders with biases are not supported")
    return common_spec(config, "qwen3", qk_norm=True, qkv_bias=False)
