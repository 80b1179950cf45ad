"""A few processes that play the ranks of one layout after another: importing torch and Megatron is the slow part."""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from actors.contract import EngineConfig
from actors.engine import Engine

T = TypeVar("T")
TIMEOUT_S = 300
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def _serve(rank: int, pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        function, arguments = pipe.recv()
        try:
            pipe.send((True, function(rank, *arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))


_opened: list[tuple[contextlib.ExitStack, Engine]] = []
"""This rank's engine, while there is one."""


def _open(rank: int, config: EngineConfig, store: str) -> None:
    from torch.distributed import FileStore

    from actors import engine

    stack = contextlib.ExitStack()
    joined = engine.opened(config, rank, FileStore(store, config.layout.world_size))
    _opened.append((stack, stack.enter_context(joined)))


def _call(_: int, function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
    return function(_opened[-1][1], *arguments)


def _close(_: int) -> None:
    import gc

    stack, _engine = _opened.pop()
    del _engine
    stack.close()
    gc.collect()


class Ranks:
    """The engines of one layout, one in each process."""

    def __init__(self, world: World, config: EngineConfig) -> None:
        self._world = world
        self.config = config

    def call(self, function: Callable[..., T], *arguments: Any) -> list[T]:
        """`function(engine, *arguments)` on every rank; results in rank order."""
        return self._world.run(_call, function, arguments, ranks=self.config.layout.world_size)


class World:
    """Ranks 0 to `size` − 1, each a process with one thread. A context manager."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __enter__(self) -> World:
        import os

        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        self._scratch = tempfile.TemporaryDirectory(prefix="tinkerbus-world-")
        self._runs = 0
        with _environment(os.environ, ENVIRONMENT):
            for rank in range(self._size):
                ours, theirs = spawn.Pipe()
                process = spawn.Process(target=_serve, args=(rank, theirs), daemon=True)
                process.start()
                self._pipes.append(ours)
                self._processes.append(process)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._scratch.cleanup()

    def run(self, function: Callable[..., T], *arguments: Any, ranks: int) -> list[T]:
        """`function(rank, *arguments)` on the first ranks; results in rank order. Raises when one failed."""
        for pipe in self._pipes[:ranks]:
            pipe.send((function, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes[:ranks]):
            if not pipe.poll(TIMEOUT_S):
                raise TimeoutError(f"rank {rank} gave no answer in {TIMEOUT_S} s")
            answers.append(pipe.recv())
        for rank, (ok, answer) in enumerate(answers):
            if not ok:
                raise AssertionError(f"rank {rank} failed:\n{answer}")
        return [answer for _, answer in answers]

    @contextlib.contextmanager
    def opened(self, config: EngineConfig) -> Iterator[Ranks]:
        """Engines of the layout, in as many of the processes as it has ranks."""
        self._runs += 1
        size = config.layout.world_size
        self.run(_open, config, str(Path(self._scratch.name) / f"store-{self._runs}"), ranks=size)
        yield Ranks(self, config)
        self.run(_close, ranks=size)  # not after a failure: the ranks are then in different places


@contextlib.contextmanager
def _environment(environment: Any, changes: dict[str, str]) -> Iterator[None]:
    before = {name: environment.get(name) for name in changes}
    environment.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del environment[name]
            else:
                environment[name] = value


__all__ = ["Engine", "Ranks", "World"]
