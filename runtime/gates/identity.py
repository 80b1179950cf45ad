"""Gates of what a request is: once whatever the network does, and nobody's trouble but its own."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import tinker
from tinker import types

from runtime.gates.by_hand import ByHand
from runtime.gates.data import datum, supervised
from runtime.gates.gate import Gate
from runtime.gates.lab import LOGPROB_BAR, PROBE, Lab, Window, apart, call
from runtime.gates.scale import WINDOW
from runtime.gates.wire import Model, grad_norm

AT_ONCE_S = 5.0
"""Until a user's mistake has to be said."""
NO_ANSWER_S = 30.0


def retry_once(lab: Lab) -> None:
    plain = lab.window(call(WINDOW))
    model = lab.warm_model()
    first = 3  # the warm-up took 1 and 2
    data, adam = supervised(WINDOW), lab.scale.adam()
    with ByHand(lab.wire) as http:
        # Again at once, and again when its result is out: an answer may be lost at either time.
        calls = [http.forward_backward(model.id, first, data) for _ in range(2)]
        answers = [http.scored(calls[0])]
        calls.append(http.forward_backward(model.id, first, data))
        answers += [http.scored(request_id) for request_id in calls[1:]]
        steps = [http.optim_step(model.id, first + 1, adam) for _ in range(2)]
        metrics = http.stepped(steps[0])
        steps.append(http.optim_step(model.id, first + 1, adam))
        again = http.stepped(steps[2])
        after = http.scored(http.forward_backward(model.id, first + 2, PROBE, forward_only=True)).logprobs
    lab.findings.must(len(set(calls)) == 1, f"the same forward_backward got the request ids {calls}")
    lab.findings.must(len(set(steps)) == 1, f"the same optim_step got the request ids {steps}")
    for answer in answers[1:]:
        lab.findings.measured("result", apart(answer.logprobs, answers[0].logprobs), LOGPROB_BAR)
    lab.same_norm("step's norm", grad_norm(again), grad_norm(metrics))
    lab.visible("the window", plain.after, lab.warm)
    sent_thrice = Window(model.id, 1, (answers[0],), grad_norm(metrics), after)
    lab.same_window("once", sent_thrice, plain)


def user_errors(lab: Lab) -> None:
    plain = lab.window(call(WINDOW))
    model = lab.warm_model()
    slowest = 0.0
    for mistake, (data, loss, config) in _mistakes().items():
        began = time.monotonic()
        what = _refusal(model, data, loss, config)
        slowest = max(slowest, time.monotonic() - began)
        lab.findings.must(what is None, f"{mistake}: {what}")
        if what is not None and what.startswith("no answer"):
            return
    lab.findings.must(slowest <= AT_ONCE_S, f"the slowest refusal took {slowest:.1f} s")
    lab.findings.note(f"{len(_mistakes())} refusals, the slowest after {slowest:.2f} s")
    lab.same_window("next window:", lab.ended(model, [model.forward_backward(supervised(WINDOW))]), plain)


def _refusal(model: Model, data: types.Datum, loss: str, config: Mapping[str, float]) -> str | None:
    """What is wrong with how the server takes a mistake; None where it fails as the user's."""
    try:
        model.client.forward_backward([data], loss, config or None).result(timeout=NO_ANSWER_S)
    except tinker.RequestFailedError as error:
        if error.category != types.RequestErrorCategory.User:
            return f"failed as category {error.category.value}"
        return "shows a traceback" if "Traceback" in error.message else None
    except TimeoutError:
        return f"no answer in {NO_ANSWER_S:g} s"
    except tinker.TinkerError as error:
        return f"raised {type(error).__name__}, not a failed future"
    return "was accepted"


def _mistakes() -> dict[str, tuple[types.Datum, str, dict[str, float]]]:
    """Per mistake: its datum, loss and configuration."""
    tokens_N, targets_N = np.array([1, 2, 3]), np.array([2, 3, 4])
    q, a = np.full(3, -5, dtype=np.float32), np.ones(3, dtype=np.float32)
    beyond = 2**30  # above any vocabulary
    return {
        "advantages missing": (
            datum(tokens_N, target_tokens=targets_N, logprobs=q),
            "importance_sampling",
            {},
        ),
        "advantages too short": (
            datum(tokens_N, target_tokens=targets_N, logprobs=q, advantages=a[:2]),
            "importance_sampling",
            {},
        ),
        "targets longer than the input": (
            datum(tokens_N, target_tokens=np.array([2, 3, 4, 5])),
            "cross_entropy",
            {},
        ),
        "a token id beyond the vocabulary": (
            datum(np.array([1, beyond, 3]), target_tokens=targets_N),
            "cross_entropy",
            {},
        ),
        "a target id beyond the vocabulary": (
            datum(tokens_N, target_tokens=np.array([2, beyond, 4])),
            "cross_entropy",
            {},
        ),
        "an unknown key of ppo's configuration": (
            datum(tokens_N, target_tokens=targets_N, logprobs=q, advantages=a),
            "ppo",
            {"clip": 0.2},
        ),
    }


GATES = (
    Gate("retry-once", "the same request again has the same id and result, and counts once", retry_once),
    Gate("user-errors", "a mistake fails at once as the user's, and harms nothing else", user_errors),
)
