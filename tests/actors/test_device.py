"""The environment of a rank's process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from actors import device

NAMES = {"OMP_NUM_THREADS", "GOMP_SPINCOUNT", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"}


def test_the_number_of_threads_is_the_ranks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It decides the bits."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    shown = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.get_num_threads())"],
        env={**os.environ, **device.environment(1)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == "1\n"


def test_what_the_operator_tuned_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "0")
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    chosen = device.environment(2)
    assert set(chosen) == NAMES
    assert chosen["GOMP_SPINCOUNT"] == "0"
    assert chosen["MALLOC_TRIM_THRESHOLD_"] == str(device.KEPT_BYTES)
