"""Gates of the gradient window: it is a plain sum, however its datums came in."""

from __future__ import annotations

import numpy as np

from runtime.gates.data import Example, examples, scaled, supervised
from runtime.gates.gate import Gate
from runtime.gates.lab import LOGPROB_BAR, LOSS_BAR, PROBE, Lab, apart, call
from runtime.gates.scale import WINDOW
from runtime.gates.wire import Scored

TAIL = [example.scaled(0.0) for example in examples((6,), seed=9)]


def twins(lab: Lab) -> None:
    lab.findings.measured("fresh", apart(lab.session.model().forward(PROBE).logprobs, lab.fresh), LOGPROB_BAR)
    first, second = (lab.window(call(WINDOW)) for _ in range(2))
    lab.same_window("trained", second, first)


def split_invariance(lab: Lab) -> None:
    whole = lab.window(call(WINDOW))
    lab.visible("the window", whole.after, lab.warm)
    for size in (4, 1):
        parts = [WINDOW[i : i + size] for i in range(0, len(WINDOW), size)]
        split = lab.window(*map(call, parts))
        lab.same_window(f"{len(parts)}x{size}", split, whole)
        error = abs(split.loss - whole.loss) / _size(WINDOW, whole.answers[0])
        lab.findings.measured(f"{len(parts)}x{size} loss", error, LOSS_BAR)


def zero_weight_tail(lab: Lab) -> None:
    plain = lab.window(call(WINDOW))
    further = lab.window(call(WINDOW), call(TAIL))
    lab.same_window("in a call of its own:", further, plain)
    lab.same_window("in the same call:", lab.window(call([*WINDOW, *TAIL])), plain)
    tail = further.answers[-1]
    lab.findings.must(tail.loss == 0.0, f"its loss is {tail.loss}, not 0")
    lp_N = tail.logprobs[0]
    lab.findings.must(
        bool((np.isfinite(lp_N) & (lp_N < 0)).all()), "its logprobs are not those of its tokens"
    )


def sum_semantics(lab: Lab) -> None:
    model = lab.warm_model()
    whole = model.forward(supervised(WINDOW))
    alone = sum(model.forward(supervised([example])).loss for example in WINDOW)
    doubled = model.forward(supervised(scaled(WINDOW, 2))).loss
    size = _size(WINDOW, whole)
    lab.findings.measured("loss of a batch", abs(whole.loss - alone) / size, LOSS_BAR)
    lab.findings.measured("of doubled weights", abs(doubled - 2 * whole.loss) / (2 * size), LOSS_BAR)

    once, twice = lab.window(call(WINDOW)), lab.window(call(scaled(WINDOW, 2)))
    lab.visible("doubling the weights", twice.after, once.after)
    lab.same_norm("twice the norm", twice.norm, None if once.norm is None else 2 * once.norm)
    lab.same_window("every datum twice:", lab.window(call([*WINDOW, *WINDOW])), twice)
    lab.same_window("every call twice:", lab.window(call(WINDOW), call(WINDOW)), twice)
    if lab.scale.smooth is not None:
        halved = lab.window(call(scaled(WINDOW, 2)), adam=lab.scale.adam(0.5))
        lab.same_step("half the learning rate", halved.after, once.after)


def _size(batch: list[Example], scored: Scored) -> float:
    """Σ|w·lp|: what a sum of either sign is to be compared with."""
    return sum(float(np.abs(e.weights_N * lp).sum()) for e, lp in zip(batch, scored.logprobs, strict=True))


GATES = (
    Gate("twins", "two models of one seed that get the same calls stay the same", twins),
    Gate(
        "split-invariance", "8 datums in 1, 2 or 8 calls, then one step: the same gradient", split_invariance
    ),
    Gate("zero-weight-tail", "a further datum of all-zero weights changes nothing", zero_weight_tail),
    Gate(
        "sum-semantics",
        "losses and gradients are plain sums: no mean over tokens, datums or calls",
        sum_semantics,
    ),
)
