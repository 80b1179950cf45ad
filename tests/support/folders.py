"""Small Hugging Face folders of random weights, made by `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
import transformers

Family = Literal["qwen2", "qwen3", "qwen3_moe", "llama"]
CLASSES = {
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.0,
}
SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
    "bos_token_id": None,
}


def random_folder(
    folder: Path,
    family: Family = "qwen3",
    *,
    tied: bool = False,
    seed: int = 0,
    max_shard_size: str = "1GB",
    **changes: Any,
) -> Path:
    """A folder in which no parameter has a special value: norms are not 1, biases not 0.

    Qwen3's and Llama's heads are wider than hidden_size / num_attention_heads, as those of Qwen3 are.
    """
    make_config, make_model = CLASSES[family]
    wide = {} if family == "qwen2" else {"head_dim": 16}
    if family == "qwen3_moe":
        wide |= EXPERTS
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 5_000.0}}
    config = make_config(**{**SHAPE, **wide, **rope, "tie_word_embeddings": tied, **changes})
    model = make_model(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder
