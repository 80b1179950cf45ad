"""Gates of order: outputs follow the client's datums, calls its program, and models do not meet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from runtime.gates.data import Example, examples, supervised
from runtime.gates.gate import Gate
from runtime.gates.lab import LOGPROB_BAR, LOSS_BAR, PROBE, Lab, Logprobs, apart, call, relative, warmed
from runtime.gates.scale import LENGTHS, WINDOW
from runtime.gates.wire import WAIT_S, Model, grad_norm, scored, stepped

RAGGED = examples((40, 3, 17, 1, 29, 3, 8, 2, 11, 17), seed=11)
"""In no order, and with equals among them that differ in their tokens alone."""
SECOND = examples(LENGTHS, seed=6)
CHUNK = 2
"""Datums a request, as the SDK is told for the gate on chunks."""
TENANTS = ((3, 8), (4, 4))
"""Seed and rank of each."""


def client_order(lab: Lab) -> None:
    model = lab.warm_model()
    together = model.forward(supervised(RAGGED))
    trained = model.forward_backward(supervised(RAGGED))
    alone = [model.forward(supervised([example])).logprobs[0] for example in RAGGED]
    lab.findings.measured("forward", apart(together.logprobs, alone), LOGPROB_BAR)
    lab.findings.measured("forward_backward", apart(trained.logprobs, alone), LOGPROB_BAR)


def pipelining(lab: Lab) -> None:
    adam = lab.scale.adam()
    ends = []
    for awaited in (True, False):
        model = lab.warm_model()
        pending = []
        for batch in (WINDOW, SECOND):
            data = supervised(batch)
            for future in (
                model.client.forward_backward(data, "cross_entropy"),
                model.client.optim_step(adam),
            ):
                pending.append(future)
                if awaited:
                    future.result(timeout=WAIT_S)
        answers = [scored(future) for future in pending[::2]]
        norms = [grad_norm(stepped(future)) for future in pending[1::2]]
        ends.append((answers, norms, model.forward(PROBE).logprobs))
    (wanted_answers, wanted_norms, wanted), (answers, norms, found) = ends
    lab.visible("the two steps", wanted, lab.warm)
    for number in range(2):
        name = f"call {number + 1}"
        error = apart(answers[number].logprobs, wanted_answers[number].logprobs)
        lab.findings.measured(name, error, LOGPROB_BAR)
        lab.same_norm(f"norm {number + 1}", norms[number], wanted_norms[number])
    lab.same_step("both steps", found, wanted)


def chunk_order(lab: Lab) -> None:
    whole = lab.window(call(WINDOW))
    model = lab.warm_model()
    with _chunks_of(model, CHUNK) as number:
        answer = model.forward_backward(supervised(WINDOW))
    chunked = lab.ended(model, [answer])
    lab.findings.note(f"{number} chunks")
    lab.findings.measured("logprobs", apart(answer.logprobs, whole.answers[0].logprobs), LOGPROB_BAR)
    lab.findings.measured("loss", relative(chunked.loss, whole.loss), LOSS_BAR)
    lab.same_window("", chunked, whole)


@contextmanager
def _chunks_of(model: Model, datums: int) -> Iterator[int]:
    """Within it the SDK splits this client's calls as if the server had told it this limit."""
    holder = model.client.holder
    told = holder._client_config
    holder._client_config = told.model_copy(update={"fwdbwd_max_chunk_len": datums})
    try:
        yield len(list(model.client._chunked_requests_generator(supervised(WINDOW))))
    finally:
        holder._client_config = told


def interleaved_tenants(lab: Lab) -> None:
    batches = ((WINDOW[:5], WINDOW[5:]), (SECOND[:3], SECOND[3:]))
    alone = [_alone(lab, seed, rank, mine) for (seed, rank), mine in zip(TENANTS, batches, strict=True)]

    first, second = (warmed(lab.session.model(seed=seed, rank=rank), lab.scale) for seed, rank in TENANTS)
    first.forward_backward(supervised(batches[0][0]))
    second.forward_backward(supervised(batches[1][0]))
    first.forward_backward(supervised(batches[0][1]))
    norms = [grad_norm(first.step(lab.scale.adam()))]
    second.forward_backward(supervised(batches[1][1]))
    norms.append(grad_norm(second.step(lab.scale.adam())))
    for name, model, norm, (before, wanted_norm, wanted) in zip(
        "AB", (first, second), norms, alone, strict=True
    ):
        lab.visible(f"{name}'s window", wanted, before, before)
        lab.same_step(f"{name} step", model.forward(PROBE).logprobs, wanted, before=before)
        lab.same_norm(f"{name} norm", norm, wanted_norm)


def _alone(
    lab: Lab, seed: int, rank: int, batches: Sequence[list[Example]]
) -> tuple[Logprobs, float | None, Logprobs]:
    """The probe before and after a window that nobody disturbs, and the window's norm."""
    model = warmed(lab.session.model(seed=seed, rank=rank), lab.scale)
    before = model.forward(PROBE).logprobs
    for batch in batches:
        model.forward_backward(supervised(batch))
    norm = grad_norm(model.step(lab.scale.adam()))
    return before, norm, model.forward(PROBE).logprobs


GATES = (
    Gate(
        "client-order",
        "outputs come back in the client's order, each as its datum alone has it",
        client_order,
    ),
    Gate("pipelining", "calls and steps sent without waiting end as those sent one by one", pipelining),
    Gate("chunk-order", "a call that the SDK splits into chunks is one call", chunk_order),
    Gate("interleaved-tenants", "two models trained in turns end as each alone", interleaved_tenants),
)
