"""The built-in `tiny` model: a byte-level Qwen3 of 3.4 million parameters, made on first use.

Fixed seed, saved as a Hugging Face folder with its tokenizer, so that it goes through the same path as any other
model and `transformers` reads the same weights.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from actors.models import qwen3
from actors.models.spec import ModelSpec

SEED = 20_26
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 320
"""256 bytes, the special tokens, and rows that no text uses."""


CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
    "eos_token_id": 256,
    "bos_token_id": None,
    "pad_token_id": 256,
}
"""What its `config.json` says."""


def config() -> Any:
    """The `transformers` configuration of the tiny model."""
    from transformers import Qwen3Config

    return Qwen3Config(**CONFIG)


def spec() -> ModelSpec:
    """Of the folder, whether it has been built or not."""
    return qwen3.spec(CONFIG)


def tokenizer() -> Any:
    """One token per byte, in byte order of the GPT-2 alphabet, then the special tokens from 256 on."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=SPECIAL_TOKENS[0],
        pad_token=SPECIAL_TOKENS[0],
        model_max_length=2048,
    )


def ensure(folder: Path) -> Path:
    """The folder of the tiny model, built there unless it is. Safe against two builders at once."""
    if (folder / "config.json").is_file():
        return folder
    import torch
    from transformers import Qwen3ForCausalLM
    from transformers.utils import logging

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = Qwen3ForCausalLM(config())
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A process id would not tell two builders apart: threads share it, and so may containers on one volume.
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        building = Path(scratch) / folder.name
        logging.disable_progress_bar()
        model.save_pretrained(building)
        tokenizer().save_pretrained(building)
        try:
            building.rename(folder)
        except OSError:
            # Another builder was first, and its folder has the same contents; or it is a real failure.
            if not (folder / "config.json").is_file():
                raise
    return folder
