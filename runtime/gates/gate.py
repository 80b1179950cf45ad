"""One property, and how it is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tinker

from runtime.gates.dumps import NoDump
from runtime.gates.lab import Bench, Lab
from runtime.gates.verdict import Level, Verdict

REFUSALS = (400, 404, 422, 501)
"""Statuses with which a server says that it does not do something."""
ABSENT = (404, 501)
LONGEST_NOTE = 300


@dataclass(frozen=True, slots=True)
class Gate:
    """See the module."""

    name: str
    asks: str
    """The property, as one line of `--help` and of the docs."""
    run: Callable[[Lab], None]
    """Puts what it measures into the lab's findings. What the SDK raises may pass through."""
    feature: tuple[str, ...] = ()
    """How a refusal names what this gate needs and a server may lack."""


def ask(gate: Gate, bench: Bench) -> Verdict:
    """Run one gate, in a session of its own."""
    try:
        with bench.wire.session() as session:
            lab = Lab(bench, session)
            gate.run(lab)
            return lab.findings.verdict()
    except tinker.RequestFailedError as error:
        by_name = error.category == tinker.types.RequestErrorCategory.User and _names(gate, error.message)
        return _unmeasured(Level.UNSUPPORTED if by_name else Level.FAILS, error.message)
    except tinker.APIStatusError as error:
        absent = gate.feature and error.status_code in ABSENT
        by_name = error.status_code in REFUSALS and _names(gate, str(error))
        return _unmeasured(
            Level.UNSUPPORTED if absent or by_name else Level.FAILS, f"HTTP {error.status_code}: {error}"
        )
    except (tinker.TinkerError, TimeoutError, NoDump, ValueError, KeyError) as error:
        # ValueError and KeyError: an answer that the SDK, or we, cannot read.
        return _unmeasured(
            Level.FAILS, f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        )


def _names(gate: Gate, text: str) -> bool:
    return any(word in text for word in gate.feature)


def _unmeasured(level: Level, why: str) -> Verdict:
    line = " ".join(why.split())
    return Verdict(level, None, None, line if len(line) <= LONGEST_NOTE else f"{line[:LONGEST_NOTE]}…")
