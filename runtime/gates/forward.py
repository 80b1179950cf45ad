"""Gates of `forward`: it is the training forward, and it leaves the window alone."""

from __future__ import annotations

import tinker

from runtime.gates.data import rollouts, supervised
from runtime.gates.gate import Gate
from runtime.gates.lab import LOGPROB_BAR, LOSS_BAR, PROBE, Lab, apart, call, relative
from runtime.gates.losses import advantages, ratio_losses, shifted
from runtime.gates.order import SECOND
from runtime.gates.scale import WINDOW


def forward_equals(lab: Lab) -> None:
    model = lab.warm_model()
    scored = model.forward(PROBE)
    for loss in ("cross_entropy", *ratio_losses()):
        data = PROBE
        if loss != "cross_entropy":
            data = rollouts(WINDOW, shifted(scored.logprobs), advantages(WINDOW), loss)
        try:
            forward = model.forward(data, loss)
        except tinker.RequestFailedError:
            lab.findings.note(f"{loss} is refused")
            continue
        trained = model.forward_backward(data, loss)
        lab.findings.measured(f"{loss} logprobs", apart(forward.logprobs, trained.logprobs), LOGPROB_BAR)
        lab.findings.measured("loss", relative(forward.loss, trained.loss), LOSS_BAR)


def forward_leaves(lab: Lab) -> None:
    plain = lab.window(call(WINDOW[:4]), call(WINDOW[4:]))
    model = lab.warm_model()
    other = supervised(SECOND)
    model.forward(other)
    answers = [model.forward_backward(supervised(WINDOW[:4]))]
    model.forward(other)
    answers.append(model.forward_backward(supervised(WINDOW[4:])))
    model.forward(other)
    lab.visible("the window", plain.after, lab.warm)
    lab.same_window("", lab.ended(model, answers), plain)


GATES = (
    Gate("forward-equals", "forward gives the logprobs and the loss of forward_backward", forward_equals),
    Gate(
        "forward-leaves", "forward between two calls changes nothing of the step behind them", forward_leaves
    ),
)
