"""What the last bits of training depend on: a snapshot goes on with the same bits where all of it is the same."""

from __future__ import annotations

import dataclasses
import hashlib
from importlib.metadata import version
from pathlib import Path

import torch

from actors.group import GroupConfig
from actors.packing import PackingConfig

FIXED = ("layout", "model")
"""What has to be the same in any case: every rank keeps a part of its own, of adapters over this base."""


class FingerprintDiffers(RuntimeError):
    """Snapshots were made where bits come out differently; the message says what changed."""


def fingerprint(group: GroupConfig, packing: PackingConfig) -> dict[str, str]:
    """Of this process's machine and libraries, and of a group's configuration."""
    engine = group.engine
    return {
        "torch": str(torch.__version__),
        "megatron-core": version("megatron-core"),
        "processor": torch.cuda.get_device_name() if group.gpus else torch.backends.cpu.get_cpu_capability(),
        "threads": str(group.threads_per_rank),
        "layout": _words(dataclasses.asdict(engine.layout)),
        "packing": _words(dataclasses.asdict(packing)),
        "dtype": engine.dtype,
        "head": "fused" if engine.fused_head else "plain",
        "fake_int4": str(engine.fake_int4),
        "model": model_files(engine.model_folder),
    }


def compare(kept: dict[str, str], now: dict[str, str], *, accept_new_bits: bool) -> list[str]:
    """What differs, in words. Raises FingerprintDiffers where that cannot be gone on from, or was not accepted."""
    names = sorted(kept.keys() | now.keys())
    changed = [name for name in names if kept.get(name) != now.get(name)]
    words = [f"{name} was {kept.get(name)} and is {now.get(name)}" for name in changed]
    for name in FIXED:
        if name in changed:
            raise FingerprintDiffers(
                f"the snapshots are of another {name}: {words[changed.index(name)]}; "
                f"go on with the old {name}, or start on another data folder"
            )
    if changed and not accept_new_bits:
        raise FingerprintDiffers(
            f"training would go on with other bits than before: {'; '.join(words)}; "
            "set recovery.accept_new_bits = true to accept that"
        )
    return words


def _words(fields: dict[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in fields.items())


def model_files(folder: Path) -> str:
    """A hash of the folder's config, and of its files' names and sizes."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
    return digest.hexdigest()
