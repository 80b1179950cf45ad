"""A PEFT adapter folder, read for sampling. What it holds beyond plain LoRA on linear layers is refused by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from runtime.sampler.contract import SamplingRefused

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, [], ()),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "fan_in_fan_out": (False, None),
}
"""Settings of PEFT that change what an adapter computes, with the values that this reader knows."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """`scaling · x Aᵀ Bᵀ` is added to the output of each named module."""

    layers: dict[str, tuple[Tensor, Tensor]]
    """A (r, in) and B (out, r), float32, by the module's name in the base model."""
    scaling: float


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def read(folder: Path) -> Adapter:
    """Raises SamplingRefused."""
    config = json.loads((folder / CONFIG).read_text())
    for name, known in _PLAIN.items():
        if config.get(name, known[0]) not in known:
            raise SamplingRefused(f"the adapter's {name} is {config[name]!r}, which is not sampled from here")
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_file(folder / WEIGHTS).items():
        module, half = _split(name)
        halves.setdefault(module, {})[half] = tensor.float()
    for module, found in halves.items():
        if found.keys() != {"lora_A", "lora_B"}:
            raise SamplingRefused(f"the adapter has only {', '.join(found)} for {module}")
    layers = {module: (found["lora_A"], found["lora_B"]) for module, found in halves.items()}
    return Adapter(layers, float(config["lora_alpha"]) / int(config["r"]))


def _split(name: str) -> tuple[str, str]:
    """`base_model.model.lm_head.lora_A.weight` as ("lm_head", "lora_A")."""
    for half in ("lora_A", "lora_B"):
        module, mark, _ = name.rpartition(f".{half}.weight")
        if mark and name.startswith(PREFIX):
            return module.removeprefix(PREFIX), half
    raise SamplingRefused(f"the adapter holds {name}, which is no LoRA of a linear layer")
