"""The base model that settings name: its folder, and whether it can be laid out as they ask. Imports no torch."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from actors.layout import Layout, LayoutError
from actors.models import tiny
from actors.models.families import spec_of
from actors.models.spec import ModelSpec, UnsupportedModel
from runtime.config import Settings

__all__ = ["LayoutError", "UnsupportedModel", "check", "folder", "layout", "spec"]


def folder(settings: Settings) -> Path:
    """The base model's folder; builds the `tiny` model on first use, which takes some seconds."""
    if settings.model == "tiny":
        return tiny.ensure(Path(settings.data).resolve() / "models" / "tiny")
    return Path(settings.model).resolve()


def spec(settings: Settings) -> ModelSpec:
    """What the folder's `config.json` says. Raises UnsupportedModel."""
    return tiny.spec() if settings.model == "tiny" else spec_of(Path(settings.model).resolve())


def layout(settings: Settings) -> Layout:
    """Raises LayoutError where the sizes contradict each other."""
    return Layout(**{field.name: getattr(settings.layout, field.name) for field in fields(Layout)})


def check(settings: Settings) -> None:
    """Raises UnsupportedModel and LayoutError, one sentence each, before anything is started."""
    layout(settings).check(spec(settings))
