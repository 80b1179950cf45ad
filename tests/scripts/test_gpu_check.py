"""`scripts/gpu_check` works as a command; a GPU's figures need a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check"


@pytest.mark.slow
def test_the_rehearsal_passes_every_gate_and_writes_its_section(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    command = [SCRIPT, "--cpu-rehearsal", "--output", page]
    ran = subprocess.run(
        command,
        check=False,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr
    assert page.read_text() == ran.stdout
    assert ran.stdout.startswith("## CPU rehearsal: not figures of a GPU\n")
    for dtype in ("float32", "bfloat16"):
        assert f"| {dtype} | bit-identical | bit-identical |" in ran.stdout
        assert ran.stdout.count(f"| {dtype} |") == 2


def test_what_is_missing_is_named_where_there_are_no_wheels(tmp_path: Path) -> None:
    """A Python of its own, without site-packages."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "$@"\n')
    bare.chmod(0o755)
    if (SCRIPT.parent / "wheels").is_dir():
        pytest.skip("wheels are there")
    ran = subprocess.run(
        [SCRIPT], check=False, env={**os.environ, "PYTHON": str(bare)}, capture_output=True, text=True
    )
    assert ran.returncode == 2
    assert "lacks megatron-core, and there is no folder" in ran.stderr
