"""Adapters of expert layers, which transformers keeps as one tensor for all experts: added into a copy of the model."""

from __future__ import annotations

import copy
import re

import torch
from torch import nn

from runtime.sampler.adapter import Adapter
from runtime.sampler.contract import SamplingRefused

_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<part>gate_proj|up_proj|down_proj)")


@torch.no_grad()
def folded(model: nn.Module, adapter: Adapter) -> nn.Module:
    """A copy of the model with every product of the adapter in its weights. Raises SamplingRefused."""
    whole = copy.deepcopy(model)
    output, inputs = whole.get_output_embeddings(), whole.get_input_embeddings()  # type: ignore[operator]
    if "lm_head" in adapter.layers and output.weight is inputs.weight:
        output.weight = nn.Parameter(output.weight.clone())  # the adapter is of the output alone
    for name, (a, b) in adapter.layers.items():
        _weight(whole, name).add_(adapter.scaling * (b @ a))
    return whole


def _weight(model: nn.Module, name: str) -> torch.Tensor:
    """Where the named layer's weight is, (out, in)."""
    modules = dict(model.named_modules())
    found = modules.get(name)
    if isinstance(found, nn.Linear):
        return found.weight
    expert = _EXPERT.fullmatch(name)
    experts = modules.get(expert["experts"]) if expert else None
    if expert is None or experts is None:
        raise SamplingRefused(f"the adapter is for {name}, which the base model does not have")
    number, part = int(expert["number"]), expert["part"]
    if part == "down_proj":
        return experts.down_proj[number]
    gate_up = experts.gate_up_proj[number]
    half = gate_up.shape[0] // 2
    return gate_up[:half] if part == "gate_proj" else gate_up[half:]
