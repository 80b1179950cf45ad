"""Where checkpoints are: one folder each, `<root>/<model>/<kind>/<name>.<seq_id>-<random>`, never written to twice.

A folder means nothing by itself. What has a row in the tables is there, whole; everything else is on its way, or left
over, and `unlisted` finds it. Folders on this machine are written in place; others are made beside and uploaded.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import fsspec
import msgspec
from fsspec.implementations.local import LocalFileSystem

from bus.subjects import escape
from runtime.checkpoints import manifest
from runtime.checkpoints.manifest import Manifest
from runtime.checkpoints.paths import KINDS
from runtime.config import Settings

_PLACE = re.compile(r"[^/]+\.\d+-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class Draft:
    """A checkpoint that is being written."""

    url: str
    parts: Path
    """Where the ranks put theirs; goes when the checkpoint is whole, or never will be."""
    folder: Path
    """Where the whole files are made."""


class Store:
    """The checkpoints of one service. Blocking: call it from a thread where it reads or writes files."""

    def __init__(self, url: str, scratch: Path) -> None:
        """`scratch`: a folder on this machine for what is under way; what an earlier life left in it goes."""
        self._fs, self._root = fsspec.core.url_to_fs(url, auto_mkdir=False)
        self._local = isinstance(self._fs, LocalFileSystem)
        self._scratch = scratch
        self._open: set[str] = set()
        shutil.rmtree(scratch, ignore_errors=True)

    def begin(self, model_id: str, kind: str, name: str, seq_id: int) -> Draft:
        """Raises OSError."""
        token = os.urandom(6).hex()
        place = f"{self._root}/{escape(model_id)}/{kind}/{escape(name)}.{seq_id}-{token}"
        url, aside = self._fs.unstrip_protocol(place), self._scratch / token
        draft = Draft(url, aside / "parts", Path(place) if self._local else aside / "whole")
        self._open.add(url)
        try:
            draft.parts.mkdir(parents=True)
            draft.folder.mkdir(parents=True)
        except OSError:
            self.abandon(draft)
            raise
        return draft

    def finish(self, draft: Draft, about: Manifest) -> int:
        """Describe what is in the draft's folder, and see it stored; its size in bytes. Raises OSError, or fsspec's.

        It stays a draft, for `unlisted`, until `close`.
        """
        sizes = {file.name: file.stat().st_size for file in sorted(draft.folder.iterdir())}
        text = msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(about, sizes=sizes)))
        with (draft.folder / manifest.FILE).open("wb") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        if self._local:
            for folder in (draft.folder, *draft.folder.parents[:3]):
                _sync(folder)
        else:
            self._fs.put(str(draft.folder), self._path(draft.url), recursive=True)
        shutil.rmtree(draft.parts.parent, ignore_errors=True)
        return sum(sizes.values()) + len(text)

    def close(self, draft: Draft) -> None:
        """Its row is written."""
        self._open.discard(draft.url)

    def abandon(self, draft: Draft) -> None:
        """Remove whatever there is of it."""
        shutil.rmtree(draft.parts.parent, ignore_errors=True)
        with contextlib.suppress(Exception):  # then it is found as unlisted
            self.remove(draft.url)
        self._open.discard(draft.url)

    def manifest(self, url: str) -> Manifest:
        """Raises OSError where there is no whole checkpoint, NewerFormat, ValueError."""
        with self._fs.open(f"{self._path(url)}/{manifest.FILE}", "rb") as file:
            return manifest.decode(file.read())

    @contextlib.contextmanager
    def here(self, url: str) -> Iterator[Path]:
        """A checkpoint's folder on this machine, fetched where it is elsewhere. Raises OSError, or fsspec's."""
        if self._local:
            yield Path(self._path(url))
            return
        fetched = self._scratch / f"fetched-{os.urandom(6).hex()}"
        try:
            fetched.parent.mkdir(parents=True, exist_ok=True)
            self._fs.get(self._path(url), str(fetched), recursive=True)
            yield fetched
        finally:
            shutil.rmtree(fetched, ignore_errors=True)

    def remove(self, url: str) -> None:
        """A checkpoint's folder, if it is there. Raises OSError, or fsspec's."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._path(url), recursive=True)

    def places(self) -> set[str]:
        """The URL of every checkpoint's folder, of whatever has the form of one, but for drafts."""
        found = set()
        for kind in KINDS:
            for place in self._fs.glob(f"{self._root}/*/{kind}/*"):
                if _PLACE.fullmatch(str(place).rsplit("/", 1)[1]):
                    found.add(self._fs.unstrip_protocol(place))
        return found - self._open

    def _path(self, url: str) -> str:
        return str(self._fs._strip_protocol(url))


def of_service(settings: Settings) -> Store:
    """The store of the service that these settings are of.

    At a URL that they name, a service has a folder of its own, so that several may share one.
    """
    data = Path(settings.data).resolve()
    url = str(data / "checkpoints")
    if settings.checkpoints.url:
        url = f"{settings.checkpoints.url.rstrip('/')}/{_own_name(data / 'checkpoints.id')}"
    return Store(url, data / "saving")


def _own_name(file: Path) -> str:
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(os.urandom(8).hex())
    return file.read_text().strip()


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
