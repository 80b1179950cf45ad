"""From a path to the files that the ranks load: whose it is, whether it fits, and where it lies.

A replay loads what was loaded before, by the folder that the ledger names, or nothing: a checkpoint of the same name
may have other weights by now.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from actors.contract import FullConfig, TenantConfig
from bus.errors import NewerFormat
from bus.events import Checkpoint, CreateModel
from bus.tables import CheckpointRow
from runtime.checkpoints import manifest
from runtime.checkpoints.manifest import BaseModel, Manifest
from runtime.checkpoints.paths import CheckpointPath, parse
from runtime.checkpoints.saving import Saving, expired
from runtime.checkpoints.store import Store
from runtime.checks import Refusal
from runtime.config import Settings
from runtime.services import Services, patiently


class CheckpointGone(RuntimeError):
    """A checkpoint is listed, or was loaded once, and its files cannot be read. Not the user's fault."""


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that may be loaded."""

    url: str
    about: Manifest


class Loading:
    """Of one life of a group."""

    def __init__(self, services: Services, store: Store, base: BaseModel, saving: Saving) -> None:
        self._s = services
        self._store = store
        self._base = base
        self._saving = saving

    async def find(self, tenant: str, checkpoint: Checkpoint, url: str | None = None) -> Found:
        """The checkpoint as the tenant names it, or the one at `url`. Raises Refusal, CheckpointGone."""
        if url is None:
            row = await self._row(tenant, checkpoint)
            url = row.url
        try:
            found = Found(url, await asyncio.to_thread(self._store.manifest, url))
        except NewerFormat as error:
            raise CheckpointGone(f"{checkpoint.path} was saved by a newer release: {error}") from error
        except Exception as error:  # OSError, or whatever the file system of the URL raises
            raise CheckpointGone(f"the files of {checkpoint.path} cannot be read: {error}") from error
        if not found.about.base.same(self._base):
            raise Refusal(
                f"{checkpoint.path} was trained on base model {found.about.base.name!r}; this server has "
                f"{self._base.name!r}, which is another one",
                "path",
            )
        return found

    async def _row(self, tenant: str, checkpoint: Checkpoint) -> CheckpointRow:
        try:
            path = parse(checkpoint.path)
        except ValueError as error:
            raise Refusal(str(error), "path") from None
        await self._saving.over(path.model_id)  # it may be what this load is of
        found = await patiently(lambda: self._s.tables.checkpoints.get(path.key))
        if found is None or not _may_load(found[0], tenant):
            raise _unknown(path)
        if checkpoint.optimizer and not found[0].optimizer:
            raise Refusal(
                f"{path} holds no optimizer state: load it with optimizer=False, or load what save_weights wrote",
                "optimizer",
            )
        return found[0]

    @staticmethod
    def check(found: Found, model: TenantConfig) -> None:
        """Raises Refusal where a model that exists cannot become what the checkpoint is."""
        if because := manifest.misfit(found.about.config, model):
            raise Refusal(
                f"{because}; a new model made from the checkpoint would take its configuration", "path"
            )

    @staticmethod
    def training(found: Found, op: CreateModel, settings: Settings) -> TenantConfig:
        """What a model made from the checkpoint trains: the same. Raises Refusal."""
        if op.base_model not in ("", settings.served_name, settings.model):
            raise Refusal(
                f"base_model {op.base_model!r} is not served here; this server has {settings.served_name!r}",
                "base_model",
            )
        config = found.about.config
        if op.lora is not None and op.lora != manifest.lora(config):
            raise Refusal("lora differs from what the checkpoint was trained with: leave it out", "lora")
        if isinstance(config, FullConfig) and settings.dtype != "float32":
            raise Refusal(
                f"the checkpoint trains every parameter, which needs a float32 base model, and this server's "
                f"dtype is {settings.dtype}",
                "path",
            )
        return config

    @contextlib.asynccontextmanager
    async def files(self, found: Found) -> AsyncIterator[Path]:
        """Its folder on this machine. Raises CheckpointGone where it cannot be fetched."""
        here = self._store.here(found.url)
        try:
            folder = await asyncio.to_thread(here.__enter__)
        except Exception as error:  # OSError, or whatever the file system of the URL raises
            raise CheckpointGone(f"the files at {found.url} cannot be read: {error}") from error
        try:
            yield folder
        finally:
            await asyncio.to_thread(here.__exit__, None, None, None)


def _may_load(row: CheckpointRow, tenant: str) -> bool:
    return (row.tenant == tenant or row.public) and not expired(row, time.time())


def _unknown(path: CheckpointPath) -> Refusal:
    return Refusal(f"path {str(path)!r} is not known", "path")
