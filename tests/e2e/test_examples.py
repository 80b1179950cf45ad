"""The examples run as they stand, and the README shows them as they are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.service import Service, started

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TIMEOUT_S = 240


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with started(tmp_path_factory.mktemp("examples")) as service:
        yield service


def run(service: Service, name: str) -> list[str]:
    """The lines an example prints; it has to succeed and to leave the error stream alone."""
    environment = os.environ | {
        "TINKER_BASE_URL": service.http,
        "TINKER_API_KEY": service.api_key,
        "TINKERBUS_NATS_URL": service.nats,
        "TINKERBUS_NATS_PASSWORD": service.nats_password,
    }
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment,
        cwd=EXAMPLES,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def losses(lines: list[str]) -> list[float]:
    return [float(found[1]) for line in lines if (found := re.match(r"loss ([0-9.]+)", line))]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("name", ["sdk_example.py", "nats_example.py"])
def test_the_loss_falls_at_every_second_of_ten_steps(service: Service, name: str) -> None:
    found = losses(run(service, name))
    assert len(found) == 10
    assert all(later < earlier for earlier, later in zip(found[::2], found[2::2], strict=False))
    assert found[-1] < found[0] / 4


@pytest.mark.e2e
@pytest.mark.slow
def test_nats_py_and_json_alone_take_a_step(service: Service) -> None:
    created, step, lines = run(service, "nats_by_hand.py")
    assert "'type': 'model_created'" in created
    assert "'finalizations': 1.0" in step
    before, after = map(float, re.findall(r"[0-9]+\.[0-9]+", lines))
    assert after < before


@pytest.mark.e2e
@pytest.mark.slow
def test_a_sampler_of_saved_weights_answers_and_a_saved_state_goes_on(service: Service) -> None:
    first, second, goes_on = run(service, "sampling_example.py")
    assert first != second
    assert re.fullmatch(r"tinker://(.+)/weights/before goes on as .+:train:1", goes_on)


@pytest.mark.parametrize("name", ["sdk_example.py", "nats_example.py", "sampling_example.py"])
def test_the_readme_shows_the_example_verbatim(name: str) -> None:
    code = (EXAMPLES / name).read_text()
    assert f"```python\n{code}```" in (ROOT / "README.md").read_text()
    assert len([line for line in code.splitlines() if line]) <= 15
