"""Which family a Hugging Face folder belongs to."""

from __future__ import annotations

from pathlib import Path

from actors.models import llama, qwen2, qwen3, qwen3_moe
from actors.models.spec import ModelSpec, UnsupportedModel, read_config

FAMILIES = (llama, qwen2, qwen3, qwen3_moe)


def spec_of(folder: Path) -> ModelSpec:
    """The spec of a folder. Raises UnsupportedModel, naming the architectures that would work."""
    config = read_config(folder)
    architectures = config.get("architectures") or []
    for family in FAMILIES:
        if any(name in family.ARCHITECTURES for name in architectures):
            return family.spec(config)
    known = ", ".join(name for family in FAMILIES for name in family.ARCHITECTURES)
    raise UnsupportedModel(f"{folder} holds {architectures or 'no architecture'}; supported are {known}")
