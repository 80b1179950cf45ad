"""The files of a checkpoint folder, written from the ranks' parts. No Megatron in here.

An adapter is a PEFT folder (`adapter_config.json`, `adapter_model.safetensors`), a model that trains every parameter a
Hugging Face one (`config.json`, `model.safetensors`, the base model's tokenizer). A training checkpoint is the same and
holds Adam's state beside it, `optimizer.safetensors`: `exp_avg.<name>` and `exp_avg_sq.<name>` under the same names,
whole, and the counters in its metadata.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import safe_open

from actors.checkpoint_parts import MOMENTS, Parts
from actors.contract import AdapterConfig, TenantConfig
from actors.models.spec import read_config

OPTIMIZER = "optimizer.safetensors"
PEFT_PREFIX = "base_model.model."
_WEIGHTS, _ADAPTER = "model.safetensors", "adapter_model.safetensors"
_COUNTERS = ("steps", "adam_steps")
_BESIDE_WEIGHTS = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Endings of what a Hugging Face folder holds beside its weights: configuration and tokenizer."""
_INDEX = ".safetensors.index.json"
_MODULES = {
    "train_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "train_mlp": ("gate_proj", "up_proj", "down_proj"),
    "train_unembed": ("lm_head",),
}


def weights_file(folder: Path, config: TenantConfig) -> tuple[Path, str]:
    """The file with the weights of such a model, and the prefix of their names in it."""
    if isinstance(config, AdapterConfig):
        return folder / _ADAPTER, PEFT_PREFIX
    return folder / _WEIGHTS, ""


def optimizer_state(folder: Path) -> tuple[int, int]:
    """(steps asked for, steps that Adam took) of a training checkpoint."""
    metadata = safe_open(folder / OPTIMIZER, framework="pt").metadata()
    steps, adam_steps = (int(metadata[name]) for name in _COUNTERS)
    return steps, adam_steps


def adapter_config(config: AdapterConfig, base_model: str) -> dict[str, Any]:
    """PEFT's description of an adapter, as it was trained."""
    modules = [name for flag, names in _MODULES.items() if getattr(config, flag) for name in names]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }


def assemble(
    parts_in: Path, folder: Path, config: TenantConfig, *, base: Path, base_model: str, optimizer: bool
) -> None:
    """Write the checkpoint's files into `folder` from what the ranks wrote. Raises OSError.

    `base`: the base model's folder; `base_model`: what an adapter says it belongs to.
    """
    parts = Parts(parts_in)
    file, prefix = weights_file(folder, config)
    parts.save(file, {prefix + key.partition(".")[2]: key for key in parts.keys("weight")})
    if isinstance(config, AdapterConfig):
        write_json(folder / "adapter_config.json", adapter_config(config, base_model))
    else:
        _copy_beside_weights(base, folder)
    if optimizer:
        counters = {name: str(getattr(parts, name)) for name in _COUNTERS}
        keys = [key for moment in MOMENTS for key in parts.keys(moment)]
        parts.save(folder / OPTIMIZER, dict(zip(keys, keys, strict=True)), counters)


def _copy_beside_weights(base: Path, folder: Path) -> None:
    """Configuration and tokenizer; the weights are float32, whatever the base's were."""
    for file in sorted(base.iterdir()):
        beside = file.suffix in _BESIDE_WEIGHTS and not file.name.endswith(_INDEX)
        if beside and file.is_file() and file.name != "config.json":
            shutil.copyfile(file, folder / file.name)
    config = read_config(base)
    named = [name for name in ("dtype", "torch_dtype") if name in config] or ["torch_dtype"]
    write_json(folder / "config.json", config | dict.fromkeys(named, "float32"))


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Returns once the file is on the disk."""
    with file.open("w") as out:
        json.dump(content, out, indent=2)
        out.write("\n")
        out.flush()
        os.fsync(out.fileno())
