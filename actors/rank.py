"""One process of a group: an `Engine` behind a Ray actor. A plain class, since actor classes cannot be subclassed.

The actor has `max_concurrency=1`, so that everything runs in the one thread that entered the device mode.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from actors import device, liveness
from actors.contract import EngineConfig
from actors.liveness import Address
from actors.models.spec import ModelSpec

if TYPE_CHECKING:
    from actors.engine import Engine

STORE_TIMEOUT = datetime.timedelta(minutes=5)


class Rank:
    """Rank number `rank` of a group of `world_size`."""

    def __init__(self, config: EngineConfig, rank: int, world_size: int, threads: int) -> None:
        torch.set_num_threads(threads)
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._stack = contextlib.ExitStack()
        self._store: TCPStore | None = None
        self._engine: Engine

    def process_id(self) -> int:
        return os.getpid()

    def host_store(self, host: str) -> int:
        """Open the group's rendezvous on a free port of `host`, and return the port. For rank 0."""
        self._store = TCPStore(
            host, 0, self._world_size, is_master=True, timeout=STORE_TIMEOUT, wait_for_workers=False
        )
        port: int = self._store.port
        return port

    def join(self, host: str, port: int, heartbeats: Address) -> ModelSpec:
        """Meet the other ranks and load the base model, beating towards `heartbeats`. Returns what was loaded."""
        liveness.beat(heartbeats, self._rank)
        with device.uncompiled():  # Megatron, which whoever only starts ranks need not import
            from actors import engine

        if self._store is None:
            self._store = TCPStore(host, port, self._world_size, is_master=False, timeout=STORE_TIMEOUT)
        self._engine = self._stack.enter_context(engine.opened(self._config, self._rank, self._store))
        return self._engine.spec

    def execute(self, operation: str, *arguments: Any) -> Any:
        """Run one of the engine's operations by name."""
        return getattr(self._engine, operation)(*arguments)
