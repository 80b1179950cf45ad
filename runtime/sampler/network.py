"""A model of transformers, taken apart into what sampling needs: hidden states over a cache, and logits."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runtime.sampler.adapter import Adapter
from runtime.sampler.contract import SamplingRefused
from runtime.sampler.routing import Router


class Network:
    """One set of weights in float32, frozen, with adapters on top where the rows have any."""

    def __init__(self, model: Any, context: int) -> None:
        for module in model.modules():
            module._forward_hooks.clear()  # a copy has those of what it was copied from
        self.model = model
        self.context = context
        """Tokens that it can look back on."""
        self.vocab_size: int = model.get_output_embeddings().out_features
        self.router = Router(model)
        self._decoder = model.get_decoder()
        self._head: nn.Module = model.get_output_embeddings()
        names = inspect.signature(type(self._decoder).forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    def hidden(self, ids_B_T: Tensor, positions_B_T: Tensor, mask_B_S: Tensor | None, cache: Any) -> Tensor:
        """Of the last layer, (B, T, H); the cache grows by T. `mask` has a 0 where a column is padding."""
        output = self._decoder(
            input_ids=ids_B_T,
            attention_mask=mask_B_S,
            position_ids=positions_B_T,
            use_cache=True,
            **{self._cache_name: cache},
        )
        hidden: Tensor = output[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """float32. Dimension 0 stays that of the rows."""
        logits: Tensor = self._head(hidden)
        return logits.float()

    def route(self, rows: list[Adapter | None]) -> None:
        self.router.route(rows)


def load(folder: Path) -> Network:
    """A Hugging Face model folder. Raises SamplingRefused where it cannot be read."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        config = json.loads((folder / "config.json").read_text())
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        raise SamplingRefused(f"the model in {folder} cannot be read: {error}", "server") from error
    model.eval().requires_grad_(False)
    return Network(model, int(config["max_position_embeddings"]))


def eos_ids(folder: Path) -> frozenset[int]:
    """What the folder says ends a text: its generation_config.json, else its config.json."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        found = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        if found is not None:
            return frozenset([found] if isinstance(found, int) else found)
    return frozenset()
