"""At most so many tenants in memory: the one used longest ago is put away on disk and comes back on its next use.

Every rank runs the same operations in the same order, so all of them put the same tenant away without a word. The
files are this life's alone: after a crash the tenants are rebuilt from the log.
"""

from __future__ import annotations

import shutil
from collections import OrderedDict
from pathlib import Path

import torch

from actors import snapshot
from actors.contract import TenantConfig
from actors.tenants import Tenant, Tenants
from bus.subjects import escape


class Residency:
    """Tenants by id, in memory or put away."""

    def __init__(self, tenants: Tenants, most: int, folder: Path | None) -> None:
        """`most`: tenants in memory, 0 for no limit; `folder`: where this rank puts the others."""
        if most and folder is None:
            raise ValueError("a limit of tenants in memory needs a folder for the others")
        self._tenants = tenants
        self._most = most
        self._folder = folder
        self._used: OrderedDict[str, None] = OrderedDict()
        """In memory, the one used longest ago first."""
        self._away: dict[str, TenantConfig] = {}
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def __contains__(self, model_id: str) -> bool:
        return model_id in self._used or model_id in self._away

    def __len__(self) -> int:
        return len(self._used) + len(self._away)

    def in_memory(self) -> int:
        """How many are not put away."""
        return len(self._used)

    def create(self, model_id: str, config: TenantConfig) -> None:
        """A fresh tenant, in memory."""
        self._make_room()
        self._tenants.create(model_id, config)
        self._used[model_id] = None

    def activate(self, model_id: str) -> Tenant:
        """The tenant, in memory and in the forward pass. KeyError when there is none."""
        if model_id in self._away:
            self._bring_back(model_id)
        tenant = self._tenants.activate(model_id)
        self._used.move_to_end(model_id)
        return tenant

    def drop(self, model_id: str) -> None:
        """Forget a tenant wherever it is."""
        if self._away.pop(model_id, None) is not None:
            self._file(model_id).unlink()
            return
        self._tenants.drop(model_id)
        del self._used[model_id]

    def _make_room(self) -> None:
        while self._most and len(self._used) >= self._most:
            model_id = next(iter(self._used))
            tenant = self._tenants.activate(model_id)
            file = self._file(model_id)
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(snapshot.take(tenant), file)
            # Only now: a disk that is full leaves it where it was.
            self._away[model_id] = tenant.config
            del self._used[model_id]
            self._tenants.drop(model_id)

    def _bring_back(self, model_id: str) -> None:
        self._make_room()
        file = self._file(model_id)
        state = snapshot.read(file)
        snapshot.restore(self._tenants.create(model_id, self._away.pop(model_id)), state)
        self._used[model_id] = None
        file.unlink()

    def _file(self, model_id: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{escape(model_id)}.pt"
