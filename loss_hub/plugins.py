"""Losses of other packages, found by the entry-point group `tinkerbus.losses`.

An entry point's name is the loss's, its value the decorated function: `focal = "focal_loss:focal"`. One that cannot be
used is left out, with a sentence that says why. None takes the place of a loss that is there already.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loss_hub.registry import Loss

GROUP = "tinkerbus.losses"


class Plugins:
    """The plug-ins of this process, loaded at the first question."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._left_out: tuple[str, ...] | None = None

    def into(self, losses: dict[str, Loss]) -> tuple[str, ...]:
        """Add them to `losses` unless that is done, or under way in this thread; what was left out, and why."""
        with self._lock:
            if self._left_out is None:
                self._left_out = ()
                self._left_out = load(entry_points(group=GROUP), losses)
            return self._left_out


def load(found: Iterable[EntryPoint], losses: dict[str, Loss]) -> tuple[str, ...]:
    """Add the losses to `losses`, which importing them does; one sentence for each that is left out."""
    left_out = []
    for point in sorted(found, key=lambda point: (point.name, point.value)):
        before = dict(losses)
        if (problem := _problem(point, losses, before)) is not None:
            losses.clear()
            losses |= before
            left_out.append(f"loss plug-in {point.name!r} ({_origin(point)}) is left out: {problem}")
    return tuple(left_out)


def _problem(point: EntryPoint, losses: dict[str, Loss], before: dict[str, Loss]) -> str | None:
    try:
        loaded = point.load()
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    if replaced := [name for name, loss in before.items() if losses.get(name) is not loss]:
        return f"it replaces the loss {replaced[0]!r}"
    registered = next((loss for loss in losses.values() if loss.function is loaded), None)
    if registered is None:
        return f"{point.value} is no function that @loss registers"
    if registered.name != point.name:
        return f"{point.value} is the loss {registered.name!r}; the entry point must have that name"
    return None


def _origin(point: EntryPoint) -> str:
    return f"{point.value} of {point.dist.name}" if point.dist is not None else point.value
