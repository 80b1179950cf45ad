"""Gates of AdamParams: every field acts, on its own step alone, as in torch's AdamW.

Gradients cannot be read, but steps can be foretold from each other. On a fresh model the first step of a negligible
eps is learning rate × sign(g) whatever the betas are. A window of zero weights behind it has gradient 0 exactly, and
its step goes on in the same direction by (b1/(1+b1)) / √(b2/(1+b2)) of a step (bias-corrected moments of g, 0). So
two steps have to end where one step of the right length ends, to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from tinker import types

from runtime.gates.data import scaled, supervised
from runtime.gates.gate import Gate
from runtime.gates.lab import LOGPROB_BAR, PROBE, STEP_BAR, VISIBLE, Lab, Logprobs, apart, call, step_error
from runtime.gates.scale import HUGE_EPS, WINDOW
from runtime.gates.wire import Model

DEFAULTS = {"beta1": 0.9, "beta2": 0.95}
"""The SDK's."""
SILENT = supervised(scaled(WINDOW, 0.0))
"""A window of it has gradient 0."""
CLIP_PART = 0.25
"""Of its norm a gradient is clipped to."""
ROOMY_CLIP = 2.0**24
"""Above any norm."""
CLIP_STRIDE, CLIP_TRIES = 4.0, 20
"""How a clip below a norm is found that nobody tells."""


def momentum(beta1: float, beta2: float) -> float:
    """Length of the second step, in first steps, when its gradient is 0."""
    return (beta1 / (1 + beta1)) / math.sqrt(beta2 / (1 + beta2))


def _after(model: Model, *steps: tuple[Sequence[types.Datum], types.AdamParams]) -> Logprobs:
    for data, adam in steps:
        model.forward_backward(data)
        model.step(adam)
    return model.forward(PROBE).logprobs


def _fresh(lab: Lab, *steps: tuple[Sequence[types.Datum], types.AdamParams]) -> Logprobs:
    """The probe after these windows on a new twin."""
    return _after(lab.session.model(), *steps)


def _one_step(lab: Lab, length: float) -> Logprobs:
    return _fresh(lab, (PROBE, lab.scale.signs(length)))


def _foretold(lab: Lab, what: str, found: Logprobs, length: float) -> None:
    lab.same_step(what, found, _one_step(lab, length), before=lab.fresh, bar=STEP_BAR)


def learning_rate(lab: Lab) -> None:
    still = _fresh(lab, (PROBE, types.AdamParams(learning_rate=0.0, weight_decay=0.5)))
    lab.findings.measured("rate 0", apart(still, lab.fresh), LOGPROB_BAR)
    short, long = 0.25, 0.75
    found = _fresh(lab, (PROBE, lab.scale.signs(short)), (SILENT, lab.scale.signs(long)))
    _foretold(lab, f"{short} then {long}", found, short + long * momentum(**DEFAULTS))
    lab.visible("the learning rate", found, _one_step(lab, short), lab.fresh)


def beta(lab: Lab, *, name: str, other: float) -> None:
    """The beta of this name, at its default and at another value."""
    ends = []
    for value in (DEFAULTS[name], other):
        adam = lab.scale.signs(0.5, **{name: value})
        ends.append(_fresh(lab, (PROBE, adam), (SILENT, adam)))
        _foretold(lab, f"{value:g}", ends[-1], 0.5 * (1 + momentum(**{**DEFAULTS, name: value})))
    lab.visible(name, ends[1], ends[0], lab.fresh)


def eps(lab: Lab) -> None:
    """Tiny: a step does not know the gradient's size. Huge: it is learning rate / eps times the gradient."""
    once = _one_step(lab, 1.0)
    lab.same_step(
        "tiny",
        _fresh(lab, (supervised(scaled(WINDOW, 4)), lab.scale.signs())),
        once,
        before=lab.fresh,
        bar=STEP_BAR,
    )
    if lab.scale.smooth is None:
        lab.findings.must(False, lab.scale.why_not)
        return
    plain = _after(lab.warm_model(), (PROBE, lab.scale.adam()))
    both = _after(lab.warm_model(), (PROBE, lab.scale.adam(2.0, eps=2 * HUGE_EPS)))
    lab.same_step("twice eps and rate", both, plain)
    sized = _after(lab.warm_model(), (supervised(scaled(WINDOW, 2)), lab.scale.adam(1.0, eps=2 * HUGE_EPS)))
    lab.same_step("twice eps and gradient", sized, plain)
    longer = _after(lab.warm_model(), (PROBE, lab.scale.adam(1.0, eps=2 * HUGE_EPS)))
    lab.visible("eps", longer, plain)


def weight_decay(lab: Lab) -> None:
    """Decoupled: with gradient 0 weights become w·(1 − rate·decay), whatever the rate alone would do.

    A product of 1 leaves no adapter, and with it the untrained model; two of ½ leave what one of ¾ leaves.
    """

    def decayed(*products: float) -> Logprobs:
        """A rate so small that nothing but its product with the decay shows."""
        rate = 2.0**-20
        steps = [
            (SILENT, types.AdamParams(learning_rate=rate, weight_decay=product / rate, beta1=0.0))
            for product in products
        ]
        return _after(lab.warm_model(), *steps)

    lab.same_step("all of it", decayed(1.0), lab.fresh, bar=STEP_BAR)
    lab.same_step("none", decayed(0.0), lab.warm, before=lab.fresh, bar=STEP_BAR)
    halved = decayed(0.5, 0.5)
    lab.same_step("half twice", halved, decayed(0.75), bar=STEP_BAR)
    lab.visible("a decay of a half", halved, lab.warm, lab.fresh)


def grad_clip_norm(lab: Lab) -> None:
    """Clipped to a part of its norm, a gradient is that part of itself; the norm reported is the one before."""
    plain = lab.window(call(WINDOW))
    roomy = lab.window(call(WINDOW), adam=lab.scale.adam(grad_clip_norm=ROOMY_CLIP))
    lab.same_step("above the norm", roomy.after, plain.after)
    if plain.norm is None:
        _clip_without_a_norm(lab, plain.after)
        return
    clipped = lab.window(call(WINDOW), adam=lab.scale.adam(grad_clip_norm=plain.norm * CLIP_PART))
    lab.same_step("to a quarter", clipped.after, lab.window(call(scaled(WINDOW, CLIP_PART))).after)
    lab.same_norm("reported norm", clipped.norm, plain.norm)
    lab.visible("clipping to a quarter", clipped.after, plain.after)


def _clip_without_a_norm(lab: Lab, plain: Logprobs) -> None:
    """Below the norm, wherever that is, a clipped gradient is as long whatever it was."""
    lab.findings.note("no gradient norm is reported")
    clip = ROOMY_CLIP
    for _ in range(CLIP_TRIES):
        clip /= CLIP_STRIDE
        adam = lab.scale.adam(grad_clip_norm=clip)
        clipped = lab.window(call(WINDOW), adam=adam).after
        if step_error(clipped, plain, lab.warm) >= VISIBLE:
            doubled = lab.window(call(scaled(WINDOW, 2)), adam=adam).after
            lab.same_step(f"to {clip:g}, of twice the gradient", doubled, clipped)
            return
    lab.findings.must(False, f"clipping to {clip:g} makes no difference")


GATES = (
    Gate(
        "adam-learning_rate", "0 moves nothing, and each step has its own", learning_rate, ("learning_rate",)
    ),
    Gate(
        "adam-beta1",
        "the momentum of the gradient decays by it",
        partial(beta, name="beta1", other=0.5),
        ("beta1",),
    ),
    Gate(
        "adam-beta2",
        "the momentum of its square decays by it",
        partial(beta, name="beta2", other=0.3),
        ("beta2",),
    ),
    Gate("adam-eps", "it is added to the denominator", eps, ("eps",)),
    Gate("adam-weight_decay", "decoupled decay of rate times decay", weight_decay, ("weight_decay",)),
    Gate(
        "adam-grad_clip_norm",
        "a global norm above it is scaled down to it, 0 is off",
        grad_clip_norm,
        ("grad_clip_norm", "clip"),
    ),
)
