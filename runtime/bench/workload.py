"""The work that every way of training is measured on: one model, one batch, one number of steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

VOCAB = 512
RANK = 8
SEED = 7
LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes of one measurement."""

    steps: int = 20
    datums: int = 32
    tokens: int = 128
    """Of one datum."""
    calls: int = 200
    """Of the latency measurement: one `forward_backward` of `call_tokens` tokens after the other."""
    call_tokens: int = 32
    warm_up: int = 2

    @property
    def tokens_per_step(self) -> int:
        return self.datums * self.tokens


def model_folder(folder: Path, *, layers: int = 4) -> Path:
    """A random Qwen3 of hidden size 256 and 512 tokens, saved on first use."""
    if (folder / "config.json").is_file():
        return folder
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(SEED)
    model: Any = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=2048,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            tie_word_embeddings=True,
        )
    )
    model.save_pretrained(folder)
    return folder


def batch(datums: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random model inputs and targets (datums, tokens) int64, and weights of 1."""
    generator = torch.Generator().manual_seed(SEED)
    full = torch.randint(0, VOCAB, (datums, tokens + 1), generator=generator)
    return full[:, :-1].contiguous(), full[:, 1:].contiguous(), torch.ones(datums, tokens)
