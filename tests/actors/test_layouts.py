"""Every layout trains the same: windows bit for bit, gradients as one rank's and as transformers' and PEFT's.

`make gates` writes the figures into `docs/gates.md`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import dumps, layouts
from tests.support.layouts import Figures, References, Trained
from tests.support.world import World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(4) as world:
        yield world


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def references(root: Path) -> References:
    return References(root)


@pytest.fixture(scope="module")
def on_one_rank(world: World, root: Path, references: References) -> dict[tuple[str, Trained], Figures]:
    """Figures of DP1, by base and kind of training."""
    return {
        (layouts.LAYOUTS[name][0], trained): layouts.measure(world, root, references, name, trained)
        for name in ("DP1", "DP1 MoE")
        for trained in layouts.TRAINED
    }


@pytest.mark.parametrize(
    ("name", "trained"),
    [
        (name, trained)
        for name in layouts.LAYOUTS
        for trained in layouts.TRAINED
        if trained == "full" or name not in layouts.PRODUCTS
    ],
)
def test_a_layout_trains_exactly(
    world: World,
    root: Path,
    references: References,
    on_one_rank: dict[tuple[str, Trained], Figures],
    name: str,
    trained: Trained,
) -> None:
    single = on_one_rank[layouts.LAYOUTS[name][0], trained]
    figures = single if single.layout == name else layouts.measure(world, root, references, name, trained)

    assert figures.one_window
    assert dumps.relative_l2(figures.windows["1×8"], single.windows["1×8"]) <= 2e-6
    assert figures.against_reference <= 5e-6
    assert figures.logprobs <= 1e-5
    assert figures.against_torch <= 1e-9
    assert figures.unequal == []
    assert (figures.compared > 0) == figures.has_replicas
    assert figures.left_out <= layouts.STEPS
