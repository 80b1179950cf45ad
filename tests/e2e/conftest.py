"""Whole services, each started once for the tests that share it; a test has models of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.service import Service, started


@dataclass(frozen=True)
class Served:
    """A running service that dumps every step."""

    service: Service
    dumps: Path


def served(
    folder: Path, environment: dict[str, str] | None = None, **sections: dict[str, object]
) -> Iterator[Served]:
    """Started with these sections of the configuration file."""
    dumps = folder / "dumps"
    config = folder / "tinkerbus.toml"
    lines = [f"[debug]\ndump_gradients = {json.dumps(str(dumps))}"]
    for name, values in sections.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    config.write_text("\n".join(lines) + "\n")
    with started(folder / "data", "--config", str(config), environment=environment) as service:
        yield Served(service, dumps)


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """DP = 1, one datum a microbatch."""
    yield from served(tmp_path_factory.mktemp("one-rank"), packing={"max_datums_per_microbatch": 1})


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """DP = 2 with the distributed optimizer, one datum a microbatch."""
    yield from served(
        tmp_path_factory.mktemp("two-ranks"),
        layout={"dp": 2, "distributed_optimizer": True},
        packing={"max_datums_per_microbatch": 1},
    )


@pytest.fixture(scope="module")
def two_shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """TP = 2 with sequence parallelism, a fused head, one datum a microbatch."""
    yield from served(
        tmp_path_factory.mktemp("two-shards"),
        layout={"tp": 2, "sequence_parallel": True},
        head={"fused": True},
        packing={"max_datums_per_microbatch": 1},
    )


@pytest.fixture(scope="session")
def default_packing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """DP = 2, microbatches of several datums; the SDK sends chunks of two datums."""
    yield from served(
        tmp_path_factory.mktemp("default-packing"), layout={"dp": 2}, client={"fwdbwd_max_chunk_len": 2}
    )
