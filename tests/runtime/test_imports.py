"""What a process imports before it can do anything: seconds of every recovery."""

from __future__ import annotations

import subprocess
import sys


def test_the_dispatcher_needs_no_megatron() -> None:
    script = "import runtime.dispatcher, sys; print(sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert "'torch'" in done.stdout
    assert "'megatron'" not in done.stdout
