"""Everything about a tenant that a later operation depends on, as this rank holds it: out of memory and back.

Weights, the optimizer's state, the gradient that no step has used yet, and the counters of the window. A tenant that
was put away and restored goes on with the same bits.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actors import optimizer as adamw
from actors.tenants import Tenant

State = dict[str, Any]
"""Tensors on the CPU and plain numbers, so that torch.load needs no pickled code."""


def file_in(folder: Path, rank: int) -> Path:
    """Where rank number `rank` keeps its part of a snapshot."""
    return folder / f"rank{rank}.pt"


def write(state: State, file: Path) -> None:
    """Returns once the file is on the disk."""
    with file.open("wb") as out:
        torch.save(state, out)
        out.flush()
        os.fsync(out.fileno())


def read(file: Path) -> State:
    state: State = torch.load(file, weights_only=True)
    return state


def take(tenant: Tenant) -> State:
    """This rank's part of the tenant."""
    window = tenant.window
    empty = window.calls == 0 and not window.lost
    return {
        "steps": tenant.steps,
        "weights": [_copy(p) for module in tenant.trained for p in module.parameters()],
        "optimizer": [
            {key: _copy(value) if isinstance(value, Tensor) else value for key, value in state.items()}
            for state in adamw.states(tenant.optimizer)
        ],
        "gradient": [] if empty else [_copy(buffer) for buffer in window.buffers()],
        "window": {
            "calls": window.calls,
            "microbatches": window.microbatches,
            "tokens": window.tokens,
            "lost": sorted(window.lost),
        },
    }


@torch.no_grad()
def restore(tenant: Tenant, state: State) -> None:
    """Make a fresh tenant of the same configuration what the taken one was."""
    parameters = [p for module in tenant.trained for p in module.parameters()]
    for parameter, values in zip(parameters, state["weights"], strict=True):
        parameter.copy_(values)
    adamw.set_states(tenant.optimizer, state["optimizer"])
    if state["gradient"]:
        for buffer, values in zip(tenant.window.buffers(), state["gradient"], strict=True):
            buffer.copy_(values)
    window, counted = tenant.window, state["window"]
    window.calls, window.microbatches = counted["calls"], counted["microbatches"]
    window.tokens, window.lost = counted["tokens"], set(counted["lost"])
    tenant.steps = state["steps"]


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
