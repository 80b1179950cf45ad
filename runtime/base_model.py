"""The base model that settings name: its folder, and whether it can be laid out as they ask."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from actors.layout import Layout
from actors.models import tiny
from actors.models.families import spec_of
from actors.models.spec import ModelSpec
from actors.transforms import plan
from actors.transforms.fake_int4 import FakeInt4
from runtime.config import Settings


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


def fake_int4(settings: Settings) -> FakeInt4 | None:
    """The weight transform, or None where it is off. Raises ValueError."""
    chosen = settings.fake_int4
    if chosen.convention == "off":
        return None
    return FakeInt4(chosen.convention, chosen.modules, chosen.group_size)


def check(settings: Settings) -> None:
    """Raises UnsupportedModel, LayoutError or another ValueError, one sentence each, before anything is started."""
    model, chosen = spec(settings), layout(settings)
    chosen.check(model)
    if (transform := fake_int4(settings)) is not None:
        if settings.dtype != "float32":
            raise ValueError(f"fake_int4 needs dtype float32 in this release; dtype is {settings.dtype}")
        plan.check(transform, model, chosen.tp)
