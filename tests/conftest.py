"""Fixtures that more than one folder uses: the tiny model, a local Ray."""

from __future__ import annotations

import os
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
