from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from actors import device, engine
from actors.contract import EngineConfig
from actors.engine import Engine
from actors.layout import Layout
from actors.parallel import join
from tests.support.folders import random_folder
from tests.support.models import Model


@pytest.fixture(scope="module")
def dump_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dump")


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of two layers with an untied head, for what does not need `tiny`."""
    return random_folder(tmp_path_factory.mktemp("models") / "small")


# A process is one rank of one group: a module uses one of the three below, never two.


@pytest.fixture(scope="module")
def tiny_engine(tiny_folder: Path, dump_folder: Path) -> Iterator[Engine]:
    """One rank in this process and thread, dumping every step."""
    torch.set_num_threads(1)
    with engine.opened(EngineConfig(tiny_folder, dump_gradients=dump_folder), 0, dist.HashStore()) as opened:
        yield opened


@pytest.fixture(scope="module")
def small_engine(small_folder: Path, dump_folder: Path) -> Iterator[Engine]:
    """The same with the small model."""
    torch.set_num_threads(1)
    with engine.opened(EngineConfig(small_folder, dump_gradients=dump_folder), 0, dist.HashStore()) as opened:
        yield opened


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """Megatron's parallel state of a single rank, without a model."""
    torch.set_num_threads(1)
    with device.use(), join(Layout(), 0, dist.HashStore()):
        yield


@pytest.fixture
def small_model(small_engine: Engine, dump_folder: Path) -> Callable[..., Model]:
    """`small_model(adapter, b_seed=…)`: a new model on the small base."""
    return lambda *args, **kwargs: Model(small_engine, dump_folder, *args, **kwargs)


@pytest.fixture
def tiny_model(tiny_engine: Engine, dump_folder: Path) -> Callable[..., Model]:
    """`tiny_model(adapter, b_seed=…)`: a new model on `tiny`."""
    return lambda *args, **kwargs: Model(tiny_engine, dump_folder, *args, **kwargs)
