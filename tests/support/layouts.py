"""What the table of layouts measures: windows, the step-by-step reference, and the ranks' copies of weights."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from actors import gradient_dump
from actors.contract import (
    AdapterConfig,
    EngineConfig,
    FullConfig,
    MicrobatchOutput,
    PassFailed,
    StepOutput,
    TenantConfig,
)
from actors.engine import Engine
from actors.group import RequestOutput, assemble
from actors.layout import Layout
from actors.packing import PackedRequest, PackingConfig
from actors.shards import Shard, gather
from bus.events import AdamParams
from tests.support import dumps, reference
from tests.support.adamw import TorchAdamW, difference
from tests.support.folders import random_folder
from tests.support.requests import datums, packed
from tests.support.world import Ranks, World

Trained = Literal["LoRA", "full"]
Base = Literal["dense", "moe"]
TRAINED: tuple[Trained, ...] = ("LoRA", "full")

ADAPTER = AdapterConfig(rank=8, alpha=32, seed=3)
ONE_DATUM = PackingConfig(max_datums_per_microbatch=1)
ADAM = AdamParams(learning_rate=1e-3, eps=1e-8)
LENGTHS = (7, 3, 11, 2, 5, 16, 9, 4)
SPLITS: dict[str, tuple[int, ...]] = {"1×8": (8,), "2×4": (4,) * 2, "8×1": (1,) * 8, "8 and a zero": (8, 0)}
"""Datums of each call; 0 stands for a datum whose weights are all zero."""
STEPS = 3
GAP = 1e-5
"""Datums of which two experts are closer than this are left out."""

LAYOUTS: dict[str, tuple[Base, Layout]] = {
    "DP1": ("dense", Layout()),
    "DP2": ("dense", Layout(dp=2)),
    "TP2": ("dense", Layout(tp=2)),
    "TP2 sequence parallel": ("dense", Layout(tp=2, sequence_parallel=True)),
    "PP2": ("dense", Layout(pp=2)),
    "PP2 interleaved": ("dense", Layout(pp=2, virtual_pp=2)),
    "TP2×DP2": ("dense", Layout(tp=2, dp=2)),
    "PP2×DP2": ("dense", Layout(pp=2, dp=2)),
    "TP2×PP2": ("dense", Layout(tp=2, pp=2)),
    "DP2 distributed optimizer": ("dense", Layout(dp=2, distributed_optimizer=True)),
    "DP2 overlapped": ("dense", Layout(dp=2, overlap_grad_reduce=True)),
    "DP2 distributed, overlapped": (
        "dense",
        Layout(dp=2, distributed_optimizer=True, overlap_grad_reduce=True),
    ),
    "DP1 MoE": ("moe", Layout()),
    "DP2 MoE": ("moe", Layout(dp=2)),
    "EP2 MoE": ("moe", Layout(dp=2, ep=2)),
    "EP2 MoE distributed optimizer": ("moe", Layout(dp=2, ep=2, distributed_optimizer=True)),
    "EP2×PP2 MoE": ("moe", Layout(dp=2, ep=2, pp=2)),
    "TP2×EP2 MoE sequence parallel": ("moe", Layout(tp=2, ep=2, sequence_parallel=True)),
}

PRODUCTS = {
    "TP2×PP2",
    "DP2 overlapped",
    "DP2 distributed, overlapped",
    "DP2 MoE",
    "EP2 MoE distributed optimizer",
    "EP2×PP2 MoE",
    "TP2×EP2 MoE sequence parallel",
}
"""Those whose parts are measured on their own too: CI trains them one way, `make gates` both."""

_NUMBERS = itertools.count()


def folder(root: Path, base: Base) -> Path:
    """A random model of four layers: q/k-norms, a vocabulary that two ranks do not share evenly, tied where dense."""
    here = root / base
    if not here.is_dir():
        if base == "dense":
            random_folder(here, "qwen3", tied=True, num_hidden_layers=4, vocab_size=321)
        else:
            random_folder(here, "qwen3_moe", num_hidden_layers=4, vocab_size=321)
    return here


# ---- on the ranks


def _create(engine: Engine, model_id: str, config: TenantConfig, b_seed: int) -> None:
    engine.create(model_id, config)
    if isinstance(config, FullConfig):
        return
    with torch.no_grad():
        for shard in engine.tenants.activate(model_id).shards(lambda p: p.detach()):
            if "lora_B" in shard.name:
                shard.tensor.copy_(_slice(_random_b(shard, b_seed), shard))


def _random_b(shard: Shard, seed: int) -> Tensor:
    """The whole of it, from its name alone: the same on every layout."""
    shape = list(shard.tensor.shape)
    if shard.split is not None:
        assert shard.size is not None
        shape[shard.split] = shard.size
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{shard.name}".encode()))
    return 0.02 * torch.randn(*shape, generator=generator)


def _slice(full: Tensor, shard: Shard) -> Tensor:
    from megatron.core import parallel_state

    if shard.split is None:
        return full
    rows = shard.tensor.shape[shard.split]
    start = rows * parallel_state.get_tensor_model_parallel_rank()
    part = full.narrow(shard.split, start, min(rows, full.shape[shard.split] - start))
    padding = [0, 0] * (full.dim() - shard.split - 1) + [0, rows - part.shape[shard.split]]
    return torch.nn.functional.pad(part, padding)


def _call(
    engine: Engine, model_id: str, requests: Sequence[PackedRequest]
) -> list[list[MicrobatchOutput] | PassFailed]:
    return engine.forward_backward(model_id, requests)


def _step(engine: Engine, model_id: str, adam: AdamParams) -> StepOutput:
    return engine.optim_step(model_id, adam)


def _weights(engine: Engine, model_id: str) -> tuple[int, list[Shard]]:
    from megatron.core import parallel_state

    shards = engine.tenants.activate(model_id).shards(lambda p: p.detach().clone())
    return parallel_state.get_tensor_model_parallel_rank(), shards


def _unload(engine: Engine, model_id: str) -> None:
    engine.unload(model_id)


# ---- a model over all ranks


class Model:
    """A tenant of the ranks, under a name of its own."""

    def __init__(self, ranks: Ranks, trained: Trained, b_seed: int = 0) -> None:
        self.id = f"model-{next(_NUMBERS)}"
        self._ranks = ranks
        self._steps = 0
        config: TenantConfig = ADAPTER if trained == "LoRA" else FullConfig()
        ranks.call(_create, self.id, config, b_seed)

    def call(self, request: PackedRequest) -> RequestOutput:
        (output,) = self.together([request])
        return output

    def together(self, requests: Sequence[PackedRequest]) -> list[RequestOutput]:
        """Several requests in one pass. Raises PassFailed."""
        found = []
        for request, *parts in zip(requests, *self._ranks.call(_call, self.id, requests), strict=True):
            outputs: list[MicrobatchOutput] = []
            for part in parts:
                if isinstance(part, PassFailed):
                    raise part
                outputs.extend(part)
            found.append(assemble(request, outputs))
        return found

    def step(self, adam: AdamParams = ADAM) -> dict[str, dict[str, Tensor]]:
        """Step; everything that was dumped, whole, by kind."""
        self._ranks.call(_step, self.id, adam)
        assert self.dump is not None
        self._steps += 1
        return dumps.read(self.dump, self.id, self._steps - 1)

    @property
    def dump(self) -> Path:
        folder = self._ranks.config.dump_gradients
        assert folder is not None
        return folder

    def weights(self) -> dict[str, Tensor]:
        return gather(self._ranks.call(_weights, self.id))

    def replicas(self) -> Iterator[tuple[str, list[Tensor]]]:
        """What several ranks hold the same part of, by name, after the last step."""
        copies: dict[tuple[str, int | None], list[Tensor]] = {}
        step = self._steps - 1
        for kind in ("after", "exp_avg", "exp_avg_sq"):
            for rank in gradient_dump.ranks_of(self.dump, self.id, step):
                tp_rank, shards = gradient_dump.rank_shards(self.dump, self.id, step, rank, kind)
                for shard in shards:
                    part = None if shard.split is None else tp_rank
                    copies.setdefault((f"{kind}.{shard.name}", part), []).append(shard.tensor)
        for (name, _), tensors in copies.items():
            if len(tensors) > 1:
                yield name, tensors

    def unload(self) -> None:
        self._ranks.call(_unload, self.id)


# ---- figures


@dataclass
class Figures:
    """One row of the table."""

    layout: str
    trained: Trained
    windows: dict[str, Tensor] = field(default_factory=dict)
    """The window's gradient by split, one vector."""
    against_reference: float = 0.0
    """Gradients, relative L2, the worst of the steps."""
    logprobs: float = 0.0
    """Largest difference from the reference's, nats."""
    against_torch: float = 0.0
    """Weights against torch's AdamW fed our gradients, largest difference."""
    left_out: int = 0
    """Datums whose routing rounding could decide."""
    unequal: list[str] = field(default_factory=list)
    """Tensors of which two ranks hold different bits."""
    compared: int = 0
    """Tensors that more than one rank holds."""

    @property
    def has_replicas(self) -> bool:
        """Data-parallel copies, weights that tensor-parallel ranks hold whole, or a tied embedding on two stages."""
        base, layout = LAYOUTS[self.layout]
        shared = layout.pp > 1 and base == "dense" and self.trained == "full"
        return layout.dp > 1 or layout.tp > 1 or shared

    @property
    def one_window(self) -> bool:
        """Whether every split gives the same bits."""
        first = self.windows["1×8"]
        return all(torch.equal(found, first) for found in self.windows.values())


class References:
    """One per base and kind: loading takes longer than using."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[tuple[Base, Trained], reference.Reference] = {}

    def get(self, base: Base, trained: Trained) -> reference.Reference:
        if (base, trained) not in self._made:
            here = folder(self._root, base)
            made = (
                reference.Reference(here, ADAPTER.rank)
                if trained == "LoRA"
                else reference.FullReference(here)
            )
            self._made[base, trained] = made
        return self._made[base, trained]


def measure(world: World, root: Path, references: References, name: str, trained: Trained) -> Figures:
    """Everything about one layout and kind of training."""
    base, layout = LAYOUTS[name]
    config = EngineConfig(folder(root, base), layout, dump_gradients=root / "dumps")
    figures = Figures(name, trained)
    with world.opened(config) as ranks:
        for split, sizes in SPLITS.items():
            figures.windows[split] = _window(Model(ranks, trained), sizes)
        _steps(Model(ranks, trained, b_seed=1), references.get(base, trained), figures)
    return figures


def _window(model: Model, sizes: Sequence[int]) -> Tensor:
    tokens, inputs = datums(LENGTHS, seed=5)
    start = 0
    for size in sizes:
        if size == 0:
            model.call(packed(*datums((6,), seed=9, weight=0.0), packing=ONE_DATUM))
            continue
        here = slice(start, start + size)
        model.call(packed(tokens[here], inputs[here], packing=ONE_DATUM))
        start += size
    gradient = dumps.vector(model.step()["gradient"])
    model.unload()
    return gradient


def _steps(model: Model, other: reference.Reference, figures: Figures) -> None:
    exact = TorchAdamW(model.weights())
    for number in range(STEPS):
        other.set_weights(model.weights())
        tokens, inputs = datums(LENGTHS, seed=100 + number)
        kept = [i for i, datum in enumerate(tokens) if other.router_gap(datum) >= GAP]
        figures.left_out += len(tokens) - len(kept)
        tokens, inputs = [tokens[i] for i in kept], [inputs[i] for i in kept]
        logprobs, _ = other.accumulate("cross_entropy", tokens, inputs)
        result = model.call(packed(tokens, inputs))
        step = model.step()
        figures.logprobs = max(figures.logprobs, reference.worst(result.logprobs, logprobs))
        theirs = other.gradient()
        assert step["gradient"].keys() == theirs.keys()
        error = dumps.relative_l2(dumps.vector(step["gradient"]), dumps.vector(theirs))
        figures.against_reference = max(figures.against_reference, error)
        after = exact.step(step["gradient"], ADAM)
        for kind, wanted in (("after", after), ("exp_avg", exact.moment("exp_avg"))):
            figures.against_torch = max(figures.against_torch, difference(step[kind], wanted))
        for tensor, copies in model.replicas():
            figures.compared += 1
            if any(not torch.equal(copy, copies[0]) for copy in copies):
                figures.unequal.append(tensor)
    model.unload()
