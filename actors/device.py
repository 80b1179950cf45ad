"""Lets Megatron-core run where there is no GPU: the one place that knows CPU from CUDA.

Megatron-core names the device "cuda" throughout. On a machine without one, `use()` makes that name mean the CPU
for the calling thread: a `TorchFunctionMode` rewrites device arguments and a few `torch.cuda` functions become
stand-ins. With a GPU it does nothing. The mode is per thread: enter it in the thread that runs the rank.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")

SPIN_COUNT = 10_000
"""Turns that an OpenMP thread without work spins before it sleeps. libgomp's own default is 300,000 (milliseconds),
which other processes on the same cores have to wait for."""
KEPT_BYTES = 2**34
"""Freed memory that malloc keeps for later."""
MAPPED_BYTES = 2**30
"""Size from which malloc takes a tensor from the kernel and gives it back at once. By default tensors of a few MB
travel like that, and their pages have to be faulted in again in every pass."""


def environment(threads: int) -> dict[str, str]:
    """What a rank's process needs in its environment when it starts; what the operator has set stays.

    It decides how fast a pass is. Of the bits, only the number of threads does.
    """
    tuning = {
        "GOMP_SPINCOUNT": SPIN_COUNT,
        "MALLOC_MMAP_THRESHOLD_": MAPPED_BYTES,
        "MALLOC_TRIM_THRESHOLD_": KEPT_BYTES,
    }
    chosen = {name: os.environ.get(name, str(value)) for name, value in tuning.items()}
    return {"OMP_NUM_THREADS": str(threads), **chosen}


def has_gpu() -> bool:
    return torch.cuda.is_available()


def device() -> torch.device:
    """The device of this process's rank."""
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu() else CPU


def backend() -> str:
    """The torch.distributed backend that goes with the device."""
    return "nccl" if has_gpu() else "gloo"


def _names_cuda(value: object) -> bool:
    if isinstance(value, str):
        return value.startswith("cuda")
    return isinstance(value, torch.device) and value.type == "cuda"


class _CpuStandsInForCuda(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            name: str = func(*args)
            return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)
        if kwargs and _names_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": CPU}
        if func is torch.Tensor.to and len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        return func(*args, **(kwargs or {}))


@functools.cache
def _install_stand_ins() -> None:
    """`torch.cuda` functions that Megatron-core calls outside any torch function. Once per process."""

    def current_device() -> torch.device:
        return CPU

    def another_nothing() -> Callable[..., None]:
        """A function for each name: torch's compiler, imported later, keeps a rule for each function."""
        return lambda *_, **__: None

    torch.cuda.current_device = current_device  # type: ignore[assignment]
    for name in ("synchronize", "empty_cache", "manual_seed"):
        setattr(torch.cuda, name, another_nothing())

    # Without Transformer Engine 0.16.1 leaves this name undefined where MoE layers look for it.
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.router import TopKRouter

    # Compiling it takes longer than a small model's training, and without an expert bias it does nothing.
    compiled = TopKRouter._apply_expert_bias
    TopKRouter._apply_expert_bias = getattr(compiled, "_torchdynamo_orig_callable", compiled)
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Within it, what asks for torch.compile stays as it is, where there is no GPU: for importing Megatron-core.

    None of what it decorates is on our path on a CPU, and importing the compiler takes as long as all the rest.
    """
    if has_gpu():
        yield
        return
    right = torch.compile
    torch.compile = _as_it_is
    try:
        yield
    finally:
        torch.compile = right


def _as_it_is(model: Any = None, **_: object) -> Any:
    return _as_it_is if model is None else model


@contextlib.contextmanager
def use() -> Iterator[None]:
    """Within it, "cuda" is the rank's device, whatever the machine has."""
    if has_gpu():
        yield
        return
    _install_stand_ins()
    with _CpuStandsInForCuda():
        yield
