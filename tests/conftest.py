"""Fixtures that more than one folder uses: the tiny model, a local Ray."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TINKER_TELEMETRY", "0")


# How long an example takes says more about what else runs on the machine than about the example.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


_OUTCOME = pytest.StashKey[int]()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus in (
        pytest.ExitCode.OK,
        pytest.ExitCode.TESTS_FAILED,
    ):  # of all else, pytest still has to tell
        session.config.stash[_OUTCOME] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End the process once all is told and torn down, without taking the interpreter apart.

    Threads of torch, of Ray and of the SDK's transport live on in it; while it is taken apart under them, one has been
    seen to abort the process after a run in which everything had passed.
    """
    outcome = config.stash.get(_OUTCOME, None)
    if outcome is not None:
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            if stream is not None:
                stream.flush()
        os._exit(outcome)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from actors.models import tiny

    return tiny.ensure(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A Ray of this test run alone, with logical room for several small groups."""
    import ray

    # Ray's sockets live below its folder and their paths must stay short.
    with tempfile.TemporaryDirectory(prefix="tb-ray-", dir="/tmp") as folder:
        ray.init(
            num_cpus=16,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=folder,
        )
        try:
            yield
        finally:
            ray.shutdown()
