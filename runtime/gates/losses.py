"""Gates of the losses: values against closed forms, gradients against `cross_entropy` of the derivatives.

The gradient of any loss of target logprobs is that of Σ −w·lp with w = −dL/dlp, so a twin that gets these weights
as `cross_entropy` ends at the same weights. `cross_entropy` itself is held to its value: a short step along the
gradient takes learning rate times the norm's square off it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from runtime.gates.closed_forms import CLOSED_FORMS
from runtime.gates.data import Array, Example, examples, rollouts, scaled, supervised
from runtime.gates.gate import Gate
from runtime.gates.lab import LOGPROB_BAR, LOSS_BAR, PROBE, Call, Lab, Logprobs, apart, call, same_bits
from runtime.gates.scale import WINDOW
from runtime.gates.wire import Scored

GAPS = (-1.0, 0.6, -0.4, 0.3, 0.1, 1.0, -0.15, 0.0)
"""lp − q of one token after the other: ratios from 0.37 to 2.7, none near a bound that is asked for."""
SHORT = 0.03
"""Of a step: over which a loss falls in a straight line, nearly."""
DESCENT_BAR = 1e-2
"""Of the loss's fall, relative to what the gradient's norm foretells."""

CONFIGS: dict[str, tuple[dict[str, float], ...]] = {
    "importance_sampling": ({},),
    "ppo": ({}, {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}),
    "cispo": (
        {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
        {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    ),
    "dro": ({"beta": 0.05}, {"beta": 0.5}),
    "gspo": (
        {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0},
        {"clip_low_threshold": 0.8, "clip_high_threshold": 1.05},
    ),
}
"""Defaults are left to the server where the documentation states none."""


def ratio_losses() -> tuple[str, ...]:
    """Those that compare with the logprobs of a rollout."""
    return tuple(CLOSED_FORMS)


def shifted(logprobs: Logprobs) -> list[Array]:
    """Rollout logprobs q, float32, that lie `GAPS` below these."""
    return [lp - np.resize(GAPS, lp.shape).astype(np.float32) for lp in logprobs]


def advantages(batch: Sequence[Example]) -> list[Array]:
    """Of either sign, none 0: a 0 may mark a prompt's token."""
    return [example.weights_N * np.float32(2.0) for example in batch]


def ratio_loss(lab: Lab, *, loss: str) -> None:
    for config in CONFIGS[loss]:
        model = lab.warm_model()
        q, a = shifted(model.forward(PROBE).logprobs), advantages(WINDOW)
        answer = model.forward_backward(rollouts(WINDOW, q, a, loss), loss, config or None)
        window = lab.ended(model, [answer])
        form = CLOSED_FORMS[loss]
        found = [
            form(lp.astype(np.float64), q_N.astype(np.float64), a_N.astype(np.float64), config)
            for lp, q_N, a_N in zip(answer.logprobs, q, a, strict=True)
        ]
        name = ",".join(f"{value:g}" for value in config.values()) or "as is"
        size = sum(float(np.abs(term_N).sum()) for term_N, _ in found)
        value = sum(float(term_N.sum()) for term_N, _ in found)
        lab.findings.measured(f"{name}: value", abs(answer.loss - value) / size, LOSS_BAR)
        weights = [example.weighted(-slope_N) for example, (_, slope_N) in zip(WINDOW, found, strict=True)]
        lab.same_window(name, window, lab.window(call(weights)))
    if loss == "ppo":
        _clipped_tokens_rest(lab)


def _clipped_tokens_rest(lab: Lab) -> None:
    """Ratio e^0.5 under a bound of 1.2, advantages above 0: importance sampling learns, PPO does not."""
    q = [lp - np.float32(0.5) for lp in lab.fresh]
    a = [np.full_like(lp, 2.0) for lp in lab.fresh]
    data = rollouts(WINDOW, q, a)
    resting = lab.window(Call(data, "ppo"), fresh=True)
    lab.findings.must(same_bits(resting.after, lab.fresh), "tokens clipped by ppo move the model")
    lab.findings.must(not resting.norm, f"tokens clipped by ppo have a gradient of norm {resting.norm}")
    learning = lab.window(Call(data, "importance_sampling"), fresh=True)
    lab.visible("importance_sampling of clipped ratios", learning.after, lab.fresh, lab.fresh)


def cross_entropy(lab: Lab) -> None:
    model = lab.warm_model()
    odd = [
        example.weighted(np.resize([1.0, -2.0, 1 / 64, 0.0, 3.0], example.weights_N.shape))
        for example in WINDOW
    ]
    for name, batch in (("weights", WINDOW), ("negative, tiny, zero", odd)):
        answer = model.forward(supervised(batch))
        terms = [-e.weights_N.astype(np.float64) * lp for e, lp in zip(batch, answer.logprobs, strict=True)]
        _value(lab, name, answer, terms)
    # Two windows that are one: weights are signed numbers, and none is clamped or dropped.
    lab.same_window(
        "less what was too much",
        lab.window(call(scaled(WINDOW, 3)), call(scaled(WINDOW, -2))),
        lab.window(call(WINDOW)),
    )
    _descent(lab)


def _value(lab: Lab, name: str, answer: Scored, terms: Sequence[Array]) -> None:
    size = sum(float(np.abs(term).sum()) for term in terms)
    value = sum(float(term.sum()) for term in terms)
    lab.findings.measured(f"{name}: value", abs(answer.loss - value) / size, LOSS_BAR)


def _descent(lab: Lab) -> None:
    """L(w − η·g) = L(w) − η·|g|² + O(η²); two step lengths take the second order out."""
    if lab.scale.smooth is None:
        return
    falls = []
    for factor in (1, 2):
        adam = lab.scale.adam(SHORT * factor)
        model = lab.warm_model()
        before = model.forward_backward(PROBE)
        window = lab.ended(model, [before], adam)
        if window.norm is None:
            lab.findings.note("no gradient norm is reported: descent not measured")
            return
        after = sum(
            -float((e.weights_N.astype(np.float64) * lp).sum())
            for e, lp in zip(WINDOW, window.after, strict=True)
        )
        foretold = adam.learning_rate / adam.eps * window.norm**2
        falls.append((before.loss - after) / foretold)
    straight = 2 * falls[0] - falls[1]
    lab.findings.measured("descent", abs(straight - 1), DESCENT_BAR)


def top_k(lab: Lab) -> None:
    """(N, 2) targets: Σ_t Σ_k −w_tk·lp_tk, as if each column were sent on its own."""
    others = examples([len(e.tokens_N) for e in WINDOW], seed=31)
    columns = (
        WINDOW,
        [e.weighted(o.weights_N) for e, o in zip(_with_targets(WINDOW, others), others, strict=True)],
    )
    wide = [
        Example(
            left.tokens_N,
            np.stack([left.targets_N, right.targets_N], axis=1),
            np.stack([left.weights_N, right.weights_N], axis=1),
        )
        for left, right in zip(*columns, strict=True)
    ]
    found = lab.window(call(wide))
    wanted = lab.window(*map(call, columns))
    answer = found.answers[0]
    both = [np.stack(pair, axis=1) for pair in zip(*(w.logprobs for w in wanted.answers), strict=True)]
    lab.findings.measured("logprobs", apart(answer.logprobs, both), LOGPROB_BAR)
    terms = [-e.weights_N.astype(np.float64) * lp for e, lp in zip(wide, answer.logprobs, strict=True)]
    _value(lab, "sum", answer, terms)
    lab.same_window("", found, wanted)


def _with_targets(batch: Sequence[Example], others: Sequence[Example]) -> list[Example]:
    return [Example(e.tokens_N, o.targets_N, e.weights_N) for e, o in zip(batch, others, strict=True)]


GATES = (
    Gate(
        "loss-cross_entropy",
        "−Σ w·lp for weights of either sign, and the gradient is its own",
        cross_entropy,
        ("cross_entropy",),
    ),
    Gate(
        "loss-cross_entropy-top-k",
        "the same for several targets a position",
        top_k,
        ("target_tokens", "weights"),
    ),
    *(
        Gate(
            f"loss-{loss}",
            f"{loss} and its gradient have their closed form",
            partial(ratio_loss, loss=loss),
            (loss,),
        )
        for loss in CLOSED_FORMS
    ),
)
