"""Checkpoints as the ranks and whoever puts their parts together make them, without a service."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from actors import checkpoint_files
from actors.contract import TenantConfig
from actors.engine import Engine

BASE_MODEL = "org/base"


def save(
    call: Callable[..., list[Any]],
    model_id: str,
    config: TenantConfig,
    folder: Path,
    base: Path,
    *,
    optimizer: bool = True,
) -> Path:
    """`call(function, *arguments)` runs a function on every engine. Returns the checkpoint's folder."""
    parts, whole = folder / "parts", folder / "whole"
    parts.mkdir(parents=True)
    whole.mkdir()
    call(_save, model_id, parts, optimizer)
    while None in (outcomes := call(_saved, parts)):
        time.sleep(0.005)
    assert set(outcomes) == {""}
    checkpoint_files.assemble(parts, whole, config, base=base, base_model=BASE_MODEL, optimizer=optimizer)
    return whole


def on(engine: Engine) -> Callable[..., list[Any]]:
    """One engine in this process."""
    return lambda function, *arguments: [function(engine, *arguments)]


def moments(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / checkpoint_files.OPTIMIZER)


def _save(engine: Engine, model_id: str, parts: Path, optimizer: bool) -> None:
    engine.save(model_id, parts, optimizer)


def _saved(engine: Engine, parts: Path) -> str | None:
    return engine.saved(parts)


def create_from(engine: Engine, model_id: str, config: TenantConfig, folder: Path, optimizer: bool) -> None:
    engine.create_from(model_id, config, folder, optimizer)


def load(engine: Engine, model_id: str, folder: Path, optimizer: bool) -> None:
    engine.load(model_id, folder, optimizer)
