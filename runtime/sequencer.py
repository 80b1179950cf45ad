"""Whose turn it is: every model's operations in `seq_id` order, whatever order the log holds them in.

Pure: entries go in as they are read, turns come out. What comes out is a function of the log's contents alone, so a
replay decides the same for every model. A gap holds its own model and no other; models with something to do take
turns, by the rank time that their tenants used.

A missing number can be given up: the log then holds a `gap` entry in its place, and what waited behind it when that
was written fails and names it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bus.log import LogEntry
from runtime.lanes import Lanes

GAP = "gap"
"""Verb of the entry that stands for a number that never came."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One entry whose turn it is."""

    entry: LogEntry
    lost: int | None = None
    """The missing number that this entry waited for in vain: it must fail, and name it."""


@dataclass(slots=True)
class _Lane:
    """One model's entries."""

    tenant: str = ""
    """As its entries say; none has come while it is empty."""
    next_seq: int = 0
    waiting: dict[int, LogEntry] = field(default_factory=dict)
    end: LogEntry | None = None
    """Its `unload_model`, once read."""
    ended: bool = False
    lost: int | None = None
    lost_before: int = 0
    """Entries at log positions below this one fail for `lost`."""

    def runnable(self) -> bool:
        return self.next_seq in self.waiting or self.end is not None or (self.ended and bool(self.waiting))

    def next(self) -> LogEntry:
        """Of a runnable lane, the entry whose turn it is."""
        entry = self.waiting.get(self.next_seq)
        if entry is None:
            entry = self.waiting[min(self.waiting)] if self.waiting else self.end
        assert entry is not None
        return entry


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneState:
    """What a snapshot keeps of one model's lane; what waits in it comes off the log again."""

    next_seq: int
    lost: int | None = None
    lost_before: int = 0
    log_from: int = 1
    """No entry that has yet to have its turn stands before this position of the log."""


class Sequencer:
    """Entries of one group's log, put into order per model."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        self._fair = Lanes()

    def offer(self, entry: LogEntry) -> None:
        """Take in the next entry of the log. O(1)."""
        lane = self._lanes.setdefault(entry.model_id, _Lane())
        lane.tenant = entry.tenant
        if entry.seq_id is None:
            lane.end = entry
        elif (
            entry.seq_id >= lane.next_seq or lane.ended
        ):  # nothing of an ended model waits for another number
            lane.waiting[entry.seq_id] = entry
        if lane.runnable():
            self._fair.add(lane.tenant, entry.model_id)

    def next_turn(self) -> Turn | None:
        """The entry whose turn it is, or None while every model is idle or held by a gap."""
        model_id = self._fair.take()
        if model_id is None:
            return None
        lane = self._lanes[model_id]
        turn = self._take(lane)
        if lane.runnable():
            self._fair.add(lane.tenant, model_id)
        return turn

    def ahead(self, model_id: str) -> LogEntry | None:
        """The entry that would have the model's next turn; None where it waits for a number, for none, or has ended."""
        lane = self._lanes.get(model_id)
        return None if lane is None or lane.ended else lane.waiting.get(lane.next_seq)

    def follow(self, model_id: str) -> Turn:
        """The model's next turn out of its rotation, right behind one that it had. For a model that is not held."""
        lane = self._lanes[model_id]
        turn = self._take(lane)
        if not lane.runnable():
            self._fair.drop(lane.tenant, model_id)
        return turn

    def charge(self, tenant: str, seconds: float) -> None:
        """Rank time that this tenant's operations take: who used less comes first from now on."""
        self._fair.charge(tenant, seconds)

    def _take(self, lane: _Lane) -> Turn:
        if lane.ended and lane.waiting:
            return Turn(lane.waiting.pop(min(lane.waiting)))
        entry = lane.waiting.pop(lane.next_seq, None)
        if entry is None:
            return self._end(lane)
        lane.next_seq += 1
        if entry.verb == GAP:
            lane.lost, lane.lost_before = entry.seq_id, _position(entry)
            return Turn(entry)
        held = lane.lost is not None and _position(entry) < lane.lost_before
        return Turn(entry, lane.lost if held else None)

    def _end(self, lane: _Lane) -> Turn:
        """What still waits behind a gap when the model ends comes first; it can never run."""
        if lane.waiting:
            seq_id = min(lane.waiting)
            return Turn(lane.waiting.pop(seq_id), lane.next_seq)
        entry, lane.end, lane.ended = lane.end, None, True
        assert entry is not None
        return Turn(entry)

    def state(self, model_id: str, read_to: int) -> LaneState:
        """Of a model that has had a turn, with the log read up to position `read_to`."""
        lane = self._lanes[model_id]
        ahead = [_position(entry) for entry in lane.waiting.values()]
        if lane.end is not None:
            ahead.append(_position(lane.end))
        return LaneState(
            next_seq=lane.next_seq,
            lost=lane.lost,
            lost_before=lane.lost_before,
            log_from=min(ahead, default=read_to + 1),
        )

    def resume(self, model_id: str, state: LaneState) -> None:
        """Go on where a snapshot was taken. Before any entry of the model is offered."""
        self._lanes[model_id] = _Lane(next_seq=state.next_seq, lost=state.lost, lost_before=state.lost_before)

    def end(self, model_id: str) -> None:
        """The model ended in an earlier life. Before any entry of it is offered."""
        self._lanes[model_id] = _Lane(ended=True)

    def taken(self, model_id: str, seq_id: int | None) -> bool:
        """Whether the number has had its turn, in this life or before the snapshot. What comes again to a model that
        has ended, and is dropped, has a turn of its own.
        """
        lane = self._lanes.get(model_id)
        return lane is not None and not lane.ended and seq_id is not None and seq_id < lane.next_seq

    def ready_up_to(self, position: int) -> bool:
        """Whether an entry at or before a position of the log could have its turn now. O(models)."""
        return any(lane.runnable() and _position(lane.next()) <= position for lane in self._lanes.values())

    def ended(self, model_id: str) -> bool:
        """Whether the model's `unload_model` has had its turn."""
        lane = self._lanes.get(model_id)
        return lane is not None and lane.ended

    def missing(self) -> dict[str, int]:
        """Per model that waits for a number: that number."""
        return {
            model_id: lane.next_seq
            for model_id, lane in self._lanes.items()
            if lane.waiting and lane.next_seq not in lane.waiting and not lane.ended
        }

    def depth(self) -> dict[str, int]:
        """Entries that wait, per model that has any."""
        return {model_id: len(lane.waiting) for model_id, lane in self._lanes.items() if lane.waiting}


def _position(entry: LogEntry) -> int:
    assert entry.position is not None, "entries come from the log"
    return entry.position
