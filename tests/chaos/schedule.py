"""What a seed stands for: which process is hit, how, and when. Pure; the same seed gives the same schedule."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Kinds of processes below `tinkerbus up`. Raylet and GCS go with everything: Ray does not outlive them."""

    RANK = "rank"
    DISPATCHER = "dispatcher"
    INGRESS = "ingress"
    INTAKE = "intake"
    EXPORTER = "exporter"
    PROXY = "proxy"
    CONTROLLER = "controller"
    BROKER = "broker"
    EVERYTHING = "everything"


KILL, STOP = "SIGKILL", "SIGSTOP"

LEASE_S, HEARTBEAT_S = 3.0, 4.0
"""Of the service under test; every stop outlasts both."""

STOPS_S: dict[Kind, tuple[float, float]] = {Kind.BROKER: (5.0, 7.0)}
"""How long a process is stopped. Nobody else can stand in for the broker: it is back when it is woken."""

LONGEST_STOPS_S = (6.0, 24.0)
LIMITS_S: dict[Kind, float] = {
    Kind.RANK: 20.0,
    Kind.DISPATCHER: 20.0,
    Kind.BROKER: 10.0,
    Kind.EVERYTHING: 45.0,
}
"""From the event to the next result; the other kinds have no limit of their own."""

LAST_EVENT = 0.85
"""Part of the training after which nothing is hit any more."""


@dataclass(frozen=True, slots=True)
class Event:
    kind: Kind
    signal: str
    after_steps: int
    """Optimizer steps that clients have received, all tenants together."""
    delay_s: float
    """After that."""
    stop_s: float = 0.0
    which: float = 0.0
    """Of several processes of the kind, as a part of their number."""

    @property
    def what(self) -> str:
        return f"{self.signal} {self.stop_s:.1f} s" if self.signal == STOP else self.signal


def schedule(seed: int, steps: int) -> list[Event]:
    """Every kind once, in random order, spread over `steps` optimizer steps; everything at last."""
    chance = random.Random(f"chaos {seed}")
    kinds = [kind for kind in Kind if kind is not Kind.EVERYTHING]
    chance.shuffle(kinds)
    kinds.append(Kind.EVERYTHING)
    segment = LAST_EVENT * steps / len(kinds)
    events = []
    for place, kind in enumerate(kinds):
        signal = KILL if kind is Kind.EVERYTHING else chance.choice((KILL, STOP))
        events.append(
            Event(
                kind,
                signal,
                after_steps=int(segment * (place + chance.random())),
                delay_s=chance.uniform(0, 0.4),
                stop_s=chance.uniform(*STOPS_S.get(kind, LONGEST_STOPS_S)) if signal == STOP else 0.0,
                which=chance.random(),
            )
        )
    return events
