"""Snapshots on the disk: one folder each, there as a whole or not at all.

A snapshot is written aside, synced, described by a manifest, and then renamed into its place. Of every model the
newest two are kept, so that one that cannot be read costs time and nothing else; the log is needed from where the
older of them stands.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec

from actors.contract import AdapterConfig, FullConfig, TenantConfig
from bus.errors import NewerFormat, newer_format
from bus.subjects import escape
from runtime.lost_calls import OpenWindow
from runtime.sequencer import LaneState

log = logging.getLogger(__name__)

FORMAT = 1
"""Written into every manifest. Readers accept this one and all older ones."""
KEPT = 2
_ASIDE = "aside-"
_MANIFEST = "manifest.json"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a snapshot is of, beside the ranks' files."""

    model_id: str
    adapter: AdapterConfig | None
    """None for a model that trains every parameter."""
    lane: LaneState
    window: OpenWindow
    fingerprint: dict[str, str]
    """What its bits depend on; see `runtime.fingerprint`."""
    sizes: dict[str, int] = {}
    """Bytes of each file."""
    format: int = FORMAT

    @property
    def config(self) -> TenantConfig:
        return self.adapter or FullConfig()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One that is whole."""

    folder: Path
    manifest: Manifest


class Snapshots:
    """Those of one group."""

    def __init__(self, folder: Path) -> None:
        """What an earlier life left half-written in `folder` goes."""
        self._folder = folder
        for left in folder.glob(f"*/{_ASIDE}*"):
            shutil.rmtree(left)

    @classmethod
    def to_read(cls, folder: Path) -> Snapshots:
        """Those that somebody else keeps, who may be writing one now: nothing is touched."""
        kept = cls.__new__(cls)
        kept._folder = folder
        return kept

    def begin(self, model_id: str) -> Path:
        """A fresh folder for the ranks' files."""
        aside = self._of(model_id) / f"{_ASIDE}{os.urandom(6).hex()}"
        aside.mkdir(parents=True)
        return aside

    def commit(self, aside: Path, manifest: Manifest) -> None:
        """Make what the ranks wrote a snapshot, and drop the oldest beyond the two that are kept. Raises OSError."""
        sizes = {file.name: file.stat().st_size for file in aside.iterdir()}
        text = msgspec.json.encode(msgspec.structs.replace(manifest, sizes=sizes))
        with (aside / _MANIFEST).open("wb") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        _sync(aside)
        lane = manifest.lane
        place = aside.parent / f"{lane.next_seq:012d}-{lane.log_from:012d}"
        if place.exists():  # of a life whose replay we are: the same state
            shutil.rmtree(place)
        aside.rename(place)
        _sync(aside.parent)
        for old in self._places(manifest.model_id)[KEPT:]:
            shutil.rmtree(old)

    def abandon(self, aside: Path) -> None:
        shutil.rmtree(aside, ignore_errors=True)

    def of(self, model_id: str) -> list[Snapshot]:
        """Those that can be read, the newest first. Raises NewerFormat."""
        found = []
        for place in self._places(model_id):
            try:
                found.append(Snapshot(place, _read(place)))
            except NewerFormat:
                raise
            except (OSError, ValueError, msgspec.MsgspecError) as error:
                log.warning("snapshot %s cannot be used: %s", place, error)
        return found

    def forget(self, model_id: str) -> None:
        """Drop all of a model that has ended."""
        shutil.rmtree(self._of(model_id), ignore_errors=True)

    def _places(self, model_id: str) -> list[Path]:
        folder = self._of(model_id)
        if not folder.is_dir():
            return []
        places = (place for place in folder.iterdir() if not place.name.startswith(_ASIDE))
        return sorted(places, key=lambda place: place.name, reverse=True)

    def _of(self, model_id: str) -> Path:
        return self._folder / escape(model_id)


def manifest(
    model_id: str, config: TenantConfig, lane: LaneState, window: OpenWindow, fingerprint: dict[str, str]
) -> Manifest:
    adapter = config if isinstance(config, AdapterConfig) else None
    return Manifest(
        model_id=model_id, adapter=adapter, lane=lane, window=window, fingerprint=dict(fingerprint)
    )


def with_failures(manifest: Manifest, horizons: dict[int, int]) -> Manifest:
    """The manifest once operations that were under way have failed: per number, the log's end when it was known."""
    window = manifest.window
    open_now = {seq_id: at for seq_id, at in horizons.items() if seq_id > window.last_step}
    changed = dataclasses.replace(window, horizons=window.horizons | open_now)
    return msgspec.structs.replace(manifest, window=changed)


def _read(place: Path) -> Manifest:
    text = (place / _MANIFEST).read_bytes()
    number = msgspec.json.decode(text, type=dict[str, object]).get("format")
    if isinstance(number, int) and number > FORMAT:
        raise newer_format(number, FORMAT)
    found = msgspec.json.decode(text, type=Manifest)
    for name, size in found.sizes.items():
        there = (place / name).stat().st_size
        if there != size:
            raise ValueError(f"{name} has {there} bytes, and was written with {size}")
    return found


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
