"""`tinkerbus demo` as a newcomer runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.service import left_over

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_demo_shows_its_table_writes_its_files_and_leaves_nothing_running(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("tinkerbus")), "demo", "--output", str(tmp_path / "out")]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    lines: list[str] = []
    tree: list[psutil.Process] = []
    for line in demo.stdout:
        lines.append(line.strip())
        if line.startswith("(c)"):
            tree = psutil.Process(demo.pid).children(recursive=True)
    _, errors = demo.communicate()
    shown = "\n".join(lines)
    assert (demo.returncode, errors) == (0, ""), shown

    losses = [tuple(map(float, found)) for found in re.findall(r"words: ([0-9.]+) → ([0-9.]+) nats", shown)]
    assert len(losses) == 2
    assert all(after < before / 10 for before, after in losses)
    assert re.search(r"rollouts 1: .*gap \|d\| 0\.0000 ", shown)
    assert re.search(r"ROT13, nats +SDK +30 ", shown)
    assert re.search(r"ROT13, nats +NATS msgpack +15 ", shown)
    assert "answered as application/json" in shown

    assert (tmp_path / "out" / "training.png").read_bytes().startswith(b"\x89PNG")
    metrics = (tmp_path / "out" / "metrics.txt").read_text()
    for name in ("gradient_norm", "rollout_gap_mean_nats", "finalizations_total", "queue_depth"):
        assert f"\ntinkerbus_{name}{{" in metrics
    assert len(tree) > 5
    assert left_over(tree) == []
