"""Checkpoints that tests put down by hand: a row in the real table, and a folder with files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from bus.events import LoraConfig
from bus.tables import CheckpointRow
from runtime.checkpoints.paths import CheckpointPath
from tests.runtime.stand_in import BASE_MODEL, Service

FILES = {"adapter_config.json": b'{"r": 4}', "adapter_model.safetensors": bytes(range(256)) * 5000}


async def put(
    service: Service,
    model_id: str,
    checkpoint_id: str,
    tenant: str = "alice",
    *,
    age_s: float = 0.0,
    files: dict[str, bytes] = FILES,
    **fields: Any,
) -> CheckpointPath:
    """A whole checkpoint."""
    kind, _, name = checkpoint_id.partition("/")
    path = CheckpointPath(model_id, kind, name)  # type: ignore[arg-type]
    folder = folder_of(service, path)
    for file, body in files.items():
        at = folder / file
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_bytes(body)
    row: dict[str, Any] = {
        "tenant": tenant,
        "seq_id": 1,
        "url": str(folder),
        "base_model": BASE_MODEL,
        "created_at": time.time() - age_s,
        "size_bytes": sum(map(len, files.values())),
        "lora": LoraConfig(rank=4, train_unembed=False),
    }
    await service.tables.checkpoints.put(path, CheckpointRow(**{**row, **fields}))
    return path


def folder_of(service: Service, path: CheckpointPath) -> Path:
    return Path(service.settings.data, "checkpoints", *path)


def files_in(url: str) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in Path(url).iterdir()}


def folders_of(service: Service, run_id: str) -> int:
    """How many checkpoints' folders a run has."""
    return len(list(Path(service.settings.data, "checkpoints", run_id).glob("*/*")))
