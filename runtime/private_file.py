"""Files with secrets: for their owner alone, and replaced as a whole."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path


class KeyFileError(ValueError):
    """A key file in the data folder is not one of ours, or is open to others."""


def read(file: Path) -> bytes:
    """Raises FileNotFoundError, and KeyFileError where others may read it too."""
    body = file.read_bytes()
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode & 0o077:
        raise KeyFileError(f"key file {file} has mode {mode:04o}: others may read it; chmod it to 0600")
    return body


def replace(file: Path, body: bytes) -> None:
    """A reader sees the old one or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)  # mode 0600
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(body)
            out.flush()
            os.fsync(out.fileno())
        Path(name).replace(file)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
        raise
