"""A checkpoint's folder, wherever fsspec reaches: its files, their bytes, a copy, its end.

A file is named by its path below the folder, and nothing is read that the folder's own listing does not hold.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import tarfile
from collections.abc import Iterator
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from bus.subjects import escape
from runtime.checkpoints.paths import CheckpointPath

CHUNK_BYTES = 1024 * 1024
COMPLETE = "checkpoint_complete"
"""An empty file in archives, by which older clients know that they have all of it."""
_BLOCK = tarfile.BLOCKSIZE


def beside(url: str, path: CheckpointPath, nonce: str) -> str:
    """A folder for another checkpoint, under the root of this one's; another `nonce` is another folder.

    Its name is not of the form that saves give theirs: who looks for what saves have left does not take it for that.
    """
    return "/".join(
        (url.rsplit("/", 3)[0], escape(path.model_id), path.kind, f"{escape(path.name)}.copy-{nonce}")
    )


def files(url: str) -> dict[str, int]:
    """Path below the folder and bytes of every file; empty where there is no folder."""
    fs, folder = _open(url)
    found: dict[str, Any] = fs.find(folder, detail=True)
    return {
        posixpath.relpath(path, folder): int(info["size"] or 0)
        for path, info in sorted(found.items())
        if info.get("type") == "file" and not info.get("islink")
    }


def chunks(url: str, file: str) -> Iterator[bytes]:
    """The bytes of one of `files(url)`. Raises OSError."""
    fs, folder = _open(url)
    with fs.open(posixpath.join(folder, file), "rb") as opened:
        while part := opened.read(CHUNK_BYTES):
            yield part


def archive_size(listed: dict[str, int]) -> int:
    """Bytes of the archive of these files."""
    sizes = [*listed.items(), (COMPLETE, 0)]
    return sum(len(_header(name, size)) + -(-size // _BLOCK) * _BLOCK for name, size in sizes) + 2 * _BLOCK


def archive(url: str, listed: dict[str, int]) -> Iterator[bytes]:
    """A tar of these files, piece by piece. Raises OSError, also where a file is not as it was listed."""
    for name, size in listed.items():
        yield _header(name, size)
        sent = 0
        for part in chunks(url, name):
            sent += len(part)
            yield part
        if sent != size:
            raise OSError(f"{name} in {url} has {sent} bytes, and {size} were listed")
        yield bytes(-size % _BLOCK)
    yield _header(COMPLETE, 0) + bytes(2 * _BLOCK)


def copy(source: str, target: str) -> None:
    """Every file, into a folder that is new. Raises OSError, FileNotFoundError where there is none."""
    from_fs, from_folder = _open(source)
    to_fs, to_folder = _open(target)
    listed = files(source)
    if not listed:
        raise FileNotFoundError(source)
    local = isinstance(from_fs, LocalFileSystem) and isinstance(to_fs, LocalFileSystem)
    for file in listed:
        at, to = posixpath.join(from_folder, file), posixpath.join(to_folder, file)
        to_fs.makedirs(posixpath.dirname(to), exist_ok=True)
        if local and _linked(at, to):
            continue
        with from_fs.open(at, "rb") as read, to_fs.open(to, "wb") as write:
            while part := read.read(CHUNK_BYTES):
                write.write(part)


def remove(url: str) -> None:
    """The folder with all that is in it; nothing where there is none. Raises OSError."""
    fs, folder = _open(url)
    with contextlib.suppress(FileNotFoundError):
        fs.rm(folder, recursive=True)


def _open(url: str) -> tuple[Any, str]:
    fs, folder = fsspec.core.url_to_fs(url)
    return fs, folder


def _linked(at: str, to: str) -> bool:
    """No bytes are copied where a file system can hold a file under two names: nobody writes to a checkpoint's."""
    try:
        os.link(at, to)
    except OSError:
        return False
    return True


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    info.mode = 0o644
    return info.tobuf(tarfile.PAX_FORMAT)
