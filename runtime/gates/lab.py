"""What a gate works with: twins, windows, and comparisons of how they ended."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tinker import types

from runtime.gates import dumps, scale
from runtime.gates.data import Array, Example, supervised
from runtime.gates.scale import WARM_UP, WINDOW, Scale, moved
from runtime.gates.verdict import Findings
from runtime.gates.wire import Config, Model, Scored, Session, Wire, grad_norm

STEP_BAR = 1e-4
"""Of a step, relative, between twins. Faults that gates look for are beyond 0.01."""
PLAIN_STEP_BAR = 5e-2
"""The same where eps is ignored: elements near 0 flip their signs at the slightest rounding."""
NORM_BAR = 1e-4
"""Of gradient norms and vectors, relative."""
LOGPROB_BAR = 1e-4
"""Of logprobs, nats: a datum alone and in a padded microbatch."""
LOSS_BAR = 1e-5
"""Of sums of losses, relative to the sum of their terms' sizes."""
VISIBLE = 0.05
"""What has to differ differs by this part of a step at least."""

Logprobs = Sequence[Array]


@dataclass(frozen=True, slots=True)
class Call:
    """One `forward_backward`."""

    data: Sequence[types.Datum]
    loss: str = "cross_entropy"
    config: Config | None = None


def call(batch: Sequence[Example]) -> Call:
    return Call(supervised(batch))


@dataclass(frozen=True, slots=True)
class Window:
    """How a window ended, as the wire shows it."""

    model_id: str
    steps: int
    """That the model took before this window's."""
    answers: tuple[Scored, ...]
    norm: float | None
    after: Logprobs
    """Of the probe, after the step."""

    @property
    def loss(self) -> float:
        return sum(answer.loss for answer in self.answers)


class Bench:
    """One server, and what is found out about it once for all gates."""

    def __init__(self, wire: Wire, dump_folder: Path | None, loosen: float) -> None:
        self.wire = wire
        self.dump_folder = dump_folder
        self.loosen = loosen

    @functools.cached_property
    def scale(self) -> Scale:
        return scale.find(self.wire)

    @functools.cached_property
    def fresh(self) -> Logprobs:
        """The probe's logprobs on a model that nobody has trained."""
        with self.wire.session() as session:
            return session.model().forward(PROBE).logprobs

    @functools.cached_property
    def warm(self) -> Logprobs:
        """The same after the warm-up."""
        with self.wire.session() as session:
            return warmed(session.model(), self.scale).forward(PROBE).logprobs


PROBE = supervised(WINDOW)


def warmed(model: Model, scale: Scale) -> Model:
    """After one step: no half of the adapter is 0 any more."""
    model.forward_backward(supervised(WARM_UP))
    model.step(scale.adam())
    return model


class Lab:
    """One gate's share of the bench: a session of its own, and its findings."""

    def __init__(self, bench: Bench, session: Session) -> None:
        self._bench = bench
        self.session = session
        self.findings = Findings(loosen=bench.loosen)

    @property
    def wire(self) -> Wire:
        return self._bench.wire

    @property
    def scale(self) -> Scale:
        return self._bench.scale

    @property
    def fresh(self) -> Logprobs:
        return self._bench.fresh

    @property
    def warm(self) -> Logprobs:
        return self._bench.warm

    def warm_model(self) -> Model:
        return warmed(self.session.model(), self.scale)

    def window(self, *calls: Call, adam: types.AdamParams | None = None, fresh: bool = False) -> Window:
        """A new twin's window of these calls, ended by a step (`scale.adam()` unless given), and probed."""
        model = self.session.model() if fresh else self.warm_model()
        answers = [model.forward_backward(c.data, c.loss, c.config) for c in calls]
        return self.ended(model, answers, adam, steps=0 if fresh else 1)

    def ended(
        self, model: Model, answers: Sequence[Scored], adam: types.AdamParams | None = None, *, steps: int = 1
    ) -> Window:
        metrics = model.step(adam or self.scale.adam())
        after = model.forward(PROBE).logprobs
        return Window(model.id, steps, tuple(answers), grad_norm(metrics), after)

    def same_step(
        self,
        what: str,
        found: Logprobs,
        wanted: Logprobs,
        *,
        before: Logprobs | None = None,
        bar: float | None = None,
    ) -> None:
        """Two twins' logprobs after a step agree, relative to how far it went."""
        if bar is None:
            bar = STEP_BAR if self.scale.smooth is not None else PLAIN_STEP_BAR
        error = step_error(found, wanted, self.warm if before is None else before)
        self.findings.measured(what, error, bar, same_bits=same_bits(found, wanted))

    def same_norm(self, what: str, found: float | None, wanted: float | None) -> None:
        """Where the server reports norms at all."""
        if found is not None and wanted is not None:
            self.findings.measured(what, relative(found, wanted), NORM_BAR)

    def same_gradient(self, what: str, found: Window, wanted: Window) -> None:
        """Gradient vectors, rank by rank, where the server dumps them into a folder that we see."""
        folder = self._bench.dump_folder
        if folder is not None:
            error = dumps.difference(folder, (found.model_id, found.steps), (wanted.model_id, wanted.steps))
            self.findings.measured(what, error, NORM_BAR)

    def same_window(self, what: str, found: Window, wanted: Window) -> None:
        """All that shows of two windows' gradients."""
        self.same_step(f"{what} step".strip(), found.after, wanted.after)
        self.same_norm(f"{what} norm".strip(), found.norm, wanted.norm)
        self.same_gradient(f"{what} gradient".strip(), found, wanted)

    def visible(self, what: str, found: Logprobs, other: Logprobs, before: Logprobs | None = None) -> None:
        """What is said to act does act: the two differ by a good part of a step."""
        error = step_error(found, other, self.warm if before is None else before)
        self.findings.must(error >= VISIBLE, f"{what} makes no difference ({error:.1e} of a step)")


def step_error(found: Logprobs, wanted: Logprobs, before: Logprobs) -> float:
    """Root mean square of the difference, relative to that of the wanted step."""
    step = moved(wanted, before)
    error = moved(found, wanted)
    return error / step if step > 0 else (0.0 if error == 0 else float("inf"))


def same_bits(found: Logprobs, wanted: Logprobs) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))


def apart(found: Logprobs, wanted: Logprobs) -> float:
    """The largest absolute difference, nats; inf where shapes differ."""
    if [a.shape for a in found] != [b.shape for b in wanted]:
        return float("inf")
    return max(float(np.abs(a.astype(np.float64) - b).max()) for a, b in zip(found, wanted, strict=True))


def relative(found: float, wanted: float) -> float:
    """|found − wanted| relative to the larger one's size; 0 for equal ones."""
    return 0.0 if found == wanted else abs(found - wanted) / max(abs(found), abs(wanted))
