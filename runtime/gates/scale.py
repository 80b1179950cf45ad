"""How far one optimizer step should go, so that the probe's logprobs show a gradient well, found by trying.

With an eps far above every gradient element Adam is plain gradient descent: the step is smooth in the gradient and
proportional to it, and no element near 0 flips its sign. Where a server ignores eps, ordinary Adam has to do. Its
steps remember the window before, so a gradient's size still shows, but less sharply, and bars are wider.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tinker
from tinker import types

from runtime.gates.data import Array, examples, supervised
from runtime.gates.wire import Model, Wire

HUGE_EPS = 1e9
TINY_EPS = 1e-12
TRIAL_RATE = 1e-3
"""A learning rate that no eps makes dangerous."""
WANTED = 0.3
"""Root mean square, in nats, of what a step does to the probe's logprobs."""
ENOUGH = (WANTED / 4, WANTED * 4)
SEEN = 1e-4
"""Below this the rounding of float32 logprobs blurs what a step did."""
TRIES = 12

LENGTHS = (7, 3, 11, 2, 5, 16, 9, 4)
WINDOW = examples(LENGTHS, seed=5)
"""What most gates' windows hold, and what their probe scores."""
WARM_UP = examples((9, 12), seed=2)
"""A first window: in a fresh adapter one half is 0, and with it the other half's gradient."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Learning rates that move the probe by about `WANTED`."""

    smooth: float | None
    """With beta1 0 and eps `HUGE_EPS`; None where eps does nothing."""
    plain: float
    """With the SDK's defaults: from a fresh model, the first step is learning rate times sign of the gradient."""
    why_not: str = ""
    """Why there is no smooth one."""

    def adam(self, factor: float = 1.0, **fields: float) -> types.AdamParams:
        """The step of most gates, `factor` times as long."""
        if self.smooth is None:
            return self.signs(factor, **fields)
        given: dict[str, Any] = {"beta1": 0.0, "eps": HUGE_EPS, **fields}
        return types.AdamParams(learning_rate=self.smooth * factor, **given)

    def signs(self, factor: float = 1.0, **fields: float) -> types.AdamParams:
        """An Adam step whose eps is negligible."""
        given: dict[str, Any] = {"eps": TINY_EPS, **fields}
        return types.AdamParams(learning_rate=self.plain * factor, **given)


def moved(after: Sequence[Array], before: Sequence[Array]) -> float:
    """Root mean square of the difference over all tokens, nats."""
    difference = np.concatenate([(a - b).ravel() for a, b in zip(after, before, strict=True)])
    return float(np.sqrt(np.square(difference.astype(np.float64)).mean()))


class _Trials:
    """A model of its own, on which steps are tried one after the other."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._data = supervised(WINDOW)
        self._last = model.forward(self._data).logprobs

    def __call__(self, adam: types.AdamParams) -> float:
        self._model.forward_backward(self._data)
        self._model.step(adam)
        before, self._last = self._last, self._model.forward(self._data).logprobs
        return moved(self._last, before)


def find(wire: Wire) -> Scale:
    """Try steps on models of its own."""
    with wire.session() as session:
        trial = _Trials(session.model())
        plain_move = trial(types.AdamParams(learning_rate=TRIAL_RATE, eps=TINY_EPS))
        plain = TRIAL_RATE * WANTED / max(plain_move, SEEN)
        trial = _Trials(session.model())
        try:
            smooth_move = trial(_smooth(TRIAL_RATE))
        except tinker.RequestFailedError as error:
            return Scale(None, plain, f"beta1 0 and eps {HUGE_EPS:g} are refused: {error}")
        if smooth_move > plain_move / 10:
            return Scale(
                None,
                plain,
                f"eps {HUGE_EPS:g} shortens a step from {plain_move:.1e} to {smooth_move:.1e} only",
            )
        return Scale(_search(lambda rate: trial(_smooth(rate)), TRIAL_RATE, smooth_move), plain)


def _smooth(rate: float) -> types.AdamParams:
    return types.AdamParams(learning_rate=rate, beta1=0.0, eps=HUGE_EPS)


def _search(move: Callable[[float], float], rate: float, seen: float) -> float:
    """A rate whose move is about `WANTED`, from one whose move was `seen`."""
    for _ in range(TRIES):
        if ENOUGH[0] <= seen <= ENOUGH[1]:
            break
        rate *= 1000 if seen < SEEN else WANTED / seen
        seen = move(rate)
    return rate
