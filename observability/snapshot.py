"""What a process says about itself: the state of all its series, or what has changed since it last said them all.

A snapshot that gets lost loses nothing, the next one holds the same totals and more.
"""

from __future__ import annotations

import msgspec

FORMAT = 2
"""Readers accept this one and all older ones, and refuse newer ones."""


class UnreadableSnapshot(ValueError):
    """Bytes that are no snapshot, or one of a newer format."""


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One exposed value."""

    name: str
    """As exposed: a histogram's with `_bucket`, `_count` or `_sum`, buckets cumulative under the label `le`."""
    labels: dict[str, str]
    value: float


class Removal(msgspec.Struct, frozen=True, array_like=True):
    """All series with these labels are gone, in every process: their model is."""

    number: int
    """1, 2, 3 … within one incarnation."""
    labels: dict[str, str]


class Snapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    process: str
    """A role's name; a restarted process has the same."""
    incarnation: str
    """Different for every start of a process, whose counters began at 0 then."""
    number: int
    """1, 2, 3 … within one incarnation."""
    samples: tuple[Sample, ...]
    since: int | None = None
    """None: `samples` are all series. Else those alone that have changed since snapshot `since`, which held all."""
    removals: tuple[Removal, ...] = ()
    """Those of the last minute, so that a lost message loses none."""
    format: int = FORMAT


def encode(snapshot: Snapshot) -> bytes:
    return msgspec.msgpack.encode(snapshot)


def decode(body: bytes) -> Snapshot:
    """Raises UnreadableSnapshot."""
    try:
        snapshot = msgspec.msgpack.decode(body, type=Snapshot)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UnreadableSnapshot(f"not a metric snapshot: {error}") from None
    if snapshot.format > FORMAT:
        raise UnreadableSnapshot(f"format {snapshot.format} is newer than {FORMAT}, the newest known here")
    return snapshot
