"""Put first on a server's PYTHONPATH: one behaviour at a time is wrong, the one that the file MUTANT_FILE names.

The file is read at each call, so that one server serves for every mutant, and for none. FAULT_FILE likewise, see
`faults`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.abc
import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faults


def _file() -> Path:
    return Path(os.environ["MUTANT_FILE"])


def _is(name: str) -> bool:
    return _file().exists() and _file().read_text() == name


def _optimizer(module: Any) -> None:
    right = module.step

    def step(optimizer: Any, adam: Any, norm: float) -> None:
        import msgspec

        right(optimizer, msgspec.structs.replace(adam, beta2=0.95) if _is("ignored beta2") else adam, norm)

    module.step = step


def _window(module: Any) -> None:
    add, finalize = module.Window.add, module.Window.finalize

    def finalizing_add(self: Any, microbatches: int, tokens: int) -> None:
        add(self, microbatches, tokens)
        if _is("per-call finalize"):
            finalize(self)

    def finalize_unless_done(self: Any) -> None:
        if not _is("per-call finalize") or self.calls == 0:
            finalize(self)

    module.Window.add, module.Window.finalize = finalizing_add, finalize_unless_done


def _registry(module: Any) -> None:
    right = module.loss

    def loss(name: str, **declared: Any) -> Callable[[Any], Any]:
        register = right(name, **declared)

        def patched(function: Any) -> Any:
            return register(_wrong(name, function, module.LossTerms))

        return patched

    module.loss = loss


def _wrong(name: str, function: Any, terms: Any) -> Any:
    @functools.wraps(function)
    def wrong(logprobs_N: Any, batch: Any, config: Any) -> Any:
        if name == "importance_sampling" and _is("clipped importance sampling"):
            ratio_N = (logprobs_N - batch.rollout_logprobs_N).exp().clamp(0.8, 1.2)
            return terms(per_token=-ratio_N * batch.advantages_N)
        if 13 in batch.lengths and _is("loss that fails at 13 tokens"):
            raise RuntimeError("13 tokens")
        found = function(logprobs_N, batch, config)
        if _is("mean loss"):
            return terms(found.per_token / found.per_token.numel(), found.clipped_N)
        return found

    return wrong


def _group(module: Any) -> None:
    right = module.assemble

    def assemble(request: Any, outputs: Any) -> Any:
        found = right(request, outputs)
        if not _is("reordered outputs"):
            return found
        by_length = sorted(found.logprobs, key=len, reverse=True)
        return dataclasses.replace(found, logprobs=by_length)

    module.assemble = assemble


def _engine(module: Any) -> None:
    right = module.Engine.forward_backward

    def forward_backward(self: Any, model_id: str, requests: Any, labels: Any = ()) -> Any:
        if _is("poison of 13 datums") and any(len(request.lengths) == 13 for request in requests):
            os.kill(os.getpid(), signal.SIGKILL)
        if _is("forward that adds gradient"):
            requests = [dataclasses.replace(request, forward_only=False) for request in requests]
        return right(self, model_id, requests, labels)

    module.Engine.forward_backward = forward_backward


def _again() -> Path:
    """Request ids of what came more than once, a line each: written by the ingress, read by the dispatcher."""
    return _file().with_suffix(".again")


def _log(module: Any) -> None:
    right = module.OpsLog.append

    async def append(self: Any, entry: Any, **options: Any) -> Any:
        appended = await right(self, entry, **options)
        if appended.duplicate and entry.verb == "forward_backward" and _is("duplicate executed"):
            with _again().open("a") as file:
                file.write(f"{entry.request_id}\n")
        return appended

    module.OpsLog.append = append


def _hand_over(module: Any) -> None:
    right = module.HandOver._hand_over
    seen: dict[str, tuple[Any, Any]] = {}

    async def hand_over(self: Any, job: Any, op: Any) -> None:
        if isinstance(op, module.ForwardBackward):
            seen[job.entry.request_id] = job.entry, op
        elif isinstance(op, module.OptimStep) and _is("duplicate executed") and _again().exists():
            for request_id in _again().read_text().split("\n")[:-1]:
                entry, before = seen[request_id]
                if entry.model_id == job.entry.model_id:
                    self._passes.forward_backward(entry.model_id, self._packed(before), entry.seq_id)
            _again().unlink()
        await right(self, job, op)

    module.HandOver._hand_over = hand_over


def _deployments(module: Any) -> None:
    right = module._kill
    module._kill = lambda holder: None if _is("predecessors are spared") else right(holder)


MUTANTS = {
    "actors.engine": _engine,
    "actors.group": _group,
    "actors.optimizer": _optimizer,
    "actors.window": _window,
    "bus.log": _log,
    "loss_hub.registry": _registry,
    "runtime.deployments": _deployments,
    "runtime.hand_over": _hand_over,
}
PATCHES: dict[str, list[Callable[[Any], None]]] = {}
for _asked_for, _patches in (("MUTANT_FILE", MUTANTS), ("FAULT_FILE", faults.PATCHES)):
    if _asked_for in os.environ:
        for _name, _patch in _patches.items():
            PATCHES.setdefault(_name, []).append(_patch)


class _Patching(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in PATCHES:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return None
        right = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            right(module)
            for patch in PATCHES[name]:
                patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if PATCHES:
    sys.meta_path.insert(0, _Patching())
