"""Qwen2 and Qwen2.5: biases on the q, k and v projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actors.models.spec import ModelSpec, common_spec

ARCHITECTURES = ("Qwen2ForCausalLM",)


def spec(config: Mapping[str, Any]) -> ModelSpec:
    return common_spec(config, "qwen2", qk_norm=False, qkv_bias=True)
