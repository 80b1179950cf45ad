"""What the ranks write of a checkpoint, each its part, and the whole tensors that others read. No Megatron in here.

A rank's part is one file of the tensors that it is the first to hold; `Parts` puts the files of all ranks together,
tensor by tensor, so that no process ever holds more than one whole tensor of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor

from actors import tensor_file
from actors.shards import Shard, whole

Kind = Literal["weight", "exp_avg", "exp_avg_sq"]
MOMENTS: tuple[Kind, ...] = ("exp_avg", "exp_avg_sq")
_ABOUT = "tinkerbus"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(slots=True)
class Part:
    """One rank's, in memory."""

    tp_rank: int
    steps: int
    """Optimizer steps asked for, skipped ones included."""
    adam_steps: int
    """Steps taken, as Adam's bias correction counts them; 0 on a rank that steps nothing."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """`<kind>.<name>`, on the CPU."""
    splits: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Per name: the dimension that is shared out, and the whole's size in it."""


def file_in(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.safetensors"


def write(part: Part, file: Path) -> None:
    """Returns once the file is on the disk."""
    about = {
        "tp_rank": part.tp_rank,
        "steps": part.steps,
        "adam_steps": part.adam_steps,
        "splits": part.splits,
    }
    described = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in part.tensors.items()}
    tensor_file.write(file, described, part.tensors.__getitem__, {_ABOUT: json.dumps(about)})


class Parts:
    """Those of all ranks, in the files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._holders: dict[str, dict[int, Any]] = {}
        """Per key, the file that holds the part of each tensor-parallel rank."""
        self._splits: dict[str, tuple[int, int]] = {}
        self.steps = self.adam_steps = 0
        for path in sorted(folder.glob("rank*.safetensors")):
            file = safe_open(path, framework="pt")
            about = json.loads(file.metadata()[_ABOUT])
            self.steps = max(self.steps, about["steps"])
            self.adam_steps = max(self.adam_steps, about["adam_steps"])
            for name, (dimension, size) in about["splits"].items():
                self._splits[name] = (dimension, size)
            for key in file.keys():  # noqa: SIM118 - not a mapping
                self._holders.setdefault(key, {})[about["tp_rank"]] = file

    def whole(self, key: str) -> Tensor:
        """The whole tensor `<kind>.<name>`."""
        name = key.partition(".")[2]
        split, size = self._splits.get(name, (None, None))
        return whole(
            {
                tp_rank: Shard(name, file.get_tensor(key), split, size)
                for tp_rank, file in self._holders[key].items()
            }
        )

    def keys(self, kind: Kind) -> list[str]:
        return sorted(key for key in self._holders if key.startswith(f"{kind}."))

    def save(self, file: Path, named: Mapping[str, str], metadata: Mapping[str, str] | None = None) -> None:
        """Write whole tensors under new names: `named` has the keys by the names in the file."""
        described = {name: self._described(key) for name, key in named.items()}
        tensor_file.write(file, described, lambda name: self.whole(named[name]), metadata)

    def _described(self, key: str) -> tuple[torch.dtype, tuple[int, ...]]:
        name = key.partition(".")[2]
        some = next(iter(self._holders[key].values())).get_slice(key)
        shape = list(some.get_shape())
        if name in self._splits:
            dimension, size = self._splits[name]
            shape[dimension] = size
        return _DTYPES[some.get_dtype()], tuple(shape)
