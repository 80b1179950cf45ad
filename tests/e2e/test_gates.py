"""The gates against whole services of ours: DP = 2 and LoRA, right ones and wrong ones."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from runtime.gates import suite
from runtime.gates.verdict import Level, Verdict
from runtime.gates.wire import Wire, connect
from tests.e2e.conftest import Served, served
from tests.support import mutants

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LONGEST_S = 180

CAUGHT_BY = {
    "mean loss": "sum-semantics",
    "reordered outputs": "client-order",
    "per-call finalize": "split-invariance",
    "clipped importance sampling": "loss-importance_sampling",
    "ignored beta2": "adam-beta2",
    "duplicate executed": "retry-once",
    "forward that adds gradient": "forward-leaves",
}


def test_every_gate_passes_on_two_ranks(two_ranks: Served) -> None:
    command = [str(Path(sys.executable).with_name("tinkerbus")), "gates", "--url", two_ranks.service.http]
    options = ["--api-key", two_ranks.service.api_key, "--dumps", str(two_ranks.dumps)]
    began = time.monotonic()
    found = subprocess.run([*command, *options], capture_output=True, text=True, timeout=600, check=False)
    sys.stdout.write(f"{found.stdout}{time.monotonic() - began:.0f} s, to stay below {LONGEST_S} s\n")
    assert found.returncode == 0, found.stdout + found.stderr
    assert all(f" {gate.name} " in found.stdout for gate in suite.GATES)
    assert "2x4 gradient" in found.stdout  # read from the dumps


@dataclass(frozen=True)
class Mutable:
    """A service that can be made wrong, and set right again, while it runs."""

    wire: Wire
    file: Path

    def verdict(self, gate: str) -> Verdict:
        (line,) = suite.run(self.wire, suite.chosen([gate]))
        sys.stdout.write(f"{line}\n")
        return line.verdict


@pytest.fixture(scope="module")
def mutable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mutable]:
    folder = tmp_path_factory.mktemp("mutable")
    file = folder / "mutant"
    layout = {"dp": 2, "distributed_optimizer": True}
    for running in served(folder, environment=mutants.environment(file), layout=layout):
        yield Mutable(connect(running.service.http, running.service.api_key, None), file)


@pytest.mark.parametrize("mutant", CAUGHT_BY)
def test_a_wrong_server_fails_the_gate_that_a_right_one_passes(mutable: Mutable, mutant: str) -> None:
    assert mutable.verdict(CAUGHT_BY[mutant]).level is not Level.FAILS
    mutable.file.write_text(mutant)
    try:
        wrong = mutable.verdict(CAUGHT_BY[mutant])
        assert wrong.level is Level.FAILS
        assert wrong.figure is not None, wrong.note  # measured: the server was wrong, not out of order
        assert wrong.bar is not None
        assert wrong.figure > wrong.bar
    finally:
        mutable.file.unlink()
