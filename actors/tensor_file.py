"""Safetensors files, one tensor at a time: what is larger than memory can be written, and nobody is kept waiting.

The library's own writer needs every tensor in memory, twice, and holds the interpreter while it copies them: a process
that writes some GB so gives no sign of life meanwhile. The format is eight bytes of header length, a JSON header, and
the tensors' bytes one after the other (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_ALIGNED = 8

Described = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape by name."""


def write(
    file: Path,
    described: Described,
    tensor_of: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write what `described` names, each fetched when its turn comes. Returns once the file is on the disk."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name, (dtype, shape) in described.items():
        start, end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for name, (dtype, shape) in described.items():
            tensor = tensor_of(name)
            assert (tensor.dtype, tuple(tensor.shape)) == (dtype, tuple(shape)), name
            out.write(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        out.flush()
        os.fsync(out.fileno())


class TensorFile:
    """Tensors of one file by name, behind a prefix that all of their names have there."""

    def __init__(self, file: Path, prefix: str = "") -> None:
        """Raises OSError, or safetensors' own error for what is no such file."""
        self._path, self._prefix = file, prefix
        self._file = safe_open(file, framework="pt")

    def __call__(self, name: str, *shape: int) -> Tensor:
        """In float32. Raises ValueError when it is not there or has another shape."""
        try:
            tensor: Tensor = self._file.get_tensor(self._prefix + name)
        except Exception as error:
            raise ValueError(f"{self._path.name} lacks the tensor {self._prefix + name!r}") from error
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{self._path.name}: {self._prefix + name} has shape {tuple(tensor.shape)}, not {shape}"
            )
        return tensor.float()
