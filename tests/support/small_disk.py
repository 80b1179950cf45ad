"""A disk of a few megabytes, to be filled and emptied."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


class SmallDisk:
    """Made by `mounted`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    @property
    def free(self) -> int:
        """Bytes."""
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize

    def fill(self, leave: int = 0) -> None:
        """Until only `leave` bytes are free; 0 takes the last one, also while others write."""
        with self._filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while (left := self.free - leave) > 0 or leave == 0:
                file.write(b"\0" * min(2**20, max(left, 1)))

    def make_room(self) -> None:
        self._filler.unlink()


@contextlib.contextmanager
def mounted(folder: Path, size: int) -> Iterator[SmallDisk]:
    """A file system in memory of `size` bytes at `folder`. Skips the test where nothing may be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0755", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command, and a small disk takes one")
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        # Lazily: what still has a file open there, as after a failed test, must not keep the folder.
        subprocess.run(["umount", "--lazy", str(folder)], check=False)
