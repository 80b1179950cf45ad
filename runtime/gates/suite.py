"""All gates, and a run of some of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.gates import adam, forward, identity, losses, order, windows
from runtime.gates.gate import Gate, ask
from runtime.gates.lab import Bench
from runtime.gates.verdict import Level, Verdict
from runtime.gates.wire import Wire

GATES: tuple[Gate, ...] = (
    *windows.GATES,
    *order.GATES,
    *forward.GATES,
    *losses.GATES,
    *adam.GATES,
    *identity.GATES,
)


@dataclass(frozen=True, slots=True)
class Line:
    """What one gate found."""

    name: str
    asks: str
    verdict: Verdict
    seconds: float


def chosen(names: Sequence[str]) -> tuple[Gate, ...]:
    """The gates of these names, all where there are none. ValueError for a name that no gate has."""
    known = {gate.name: gate for gate in GATES}
    for name in names:
        if name not in known:
            raise ValueError(f"there is no gate {name!r}; there are {', '.join(known)}")
    return tuple(gate for gate in GATES if not names or gate.name in names)


def run(
    wire: Wire,
    gates: Sequence[Gate] = GATES,
    *,
    dump_folder: Path | None = None,
    loosen: float = 1.0,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[Line]:
    """One line a gate, as they come. `say` hears which one runs."""
    bench = Bench(wire, dump_folder, loosen)
    for gate in gates:
        say(gate.name)
        began = time.monotonic()
        verdict = ask(gate, bench)
        yield Line(gate.name, gate.asks, verdict, time.monotonic() - began)


def passed(lines: Sequence[Line]) -> bool:
    """Nothing fails. What a server does not have is no failure."""
    return all(line.verdict.level is not Level.FAILS for line in lines)
