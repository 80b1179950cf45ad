"""The gates of one rank in float32 and bfloat16, and a speed figure: `scripts/gpu_check`, described in docs/gpu.md.

Needs torch, megatron-core, msgspec, safetensors and numpy alone. The reference is `plain_qwen3`; where
transformers is importable, that reference is held to it.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from actors import device, engine, gradient_dump
from actors.contract import AdapterConfig, Dtype, EngineConfig, PassFailed
from actors.engine import Engine
from actors.models.build import DTYPES
from actors.packing import PackedRequest, PackingConfig, pack
from bus.events import AdamParams
from loss_hub import check
from scripts.plain_qwen3 import Datums, Reference, Tensors, datums, write_folder

ADAM = AdamParams(learning_rate=1e-3, eps=1e-8)
SPLITS: dict[str, tuple[int, ...]] = {"1x8": (8,), "2x4": (4, 4), "8x1": (1,) * 8, "8 and a zero": (8, 0)}
"""Datums of each call; 0 stands for a datum whose weights are all zero."""
GRADIENT_BAR = 1e-5
"""Relative L2 against the reference, float32."""
LOGPROB_BAR = 1e-4
"""Largest difference from the reference, nats, float32."""
ROUNDING_FACTOR = 1.5
"""In bfloat16 both may be this many times as far off as those of the reference computed in bfloat16."""
ADAMW_BAR = 1e-6
"""Weights after a step. Megatron takes Transformer Engine's or Apex's fused Adam where one is installed."""
TRANSFORMERS_BAR = 1e-3
"""Logits of the reference against transformers', float32."""


@dataclass(frozen=True)
class Size:
    """What is run: the whole on a GPU, a tiny version in the rehearsal."""

    gate: dict[str, int]
    """Sizes of the model that the gates are measured on."""
    lengths: tuple[int, ...]
    """Tokens of its eight datums."""
    speed: dict[str, int]
    batches: tuple[tuple[int, int], ...]
    """(datums, tokens of each) of one request, all in one microbatch."""
    repeats: int


def _sizes(
    vocab: int, hidden: int, ffn: int, layers: int, heads: int, groups: int, head: int
) -> dict[str, int]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head,
    }


WHOLE = Size(
    gate=_sizes(1024, 256, 768, 4, 4, 2, 64),
    lengths=(70, 33, 111, 20, 55, 160, 93, 42),
    speed=_sizes(151_936, 896, 4864, 24, 14, 2, 64),
    batches=((4, 1024), (1, 4096)),
    repeats=5,
)
REHEARSAL = Size(
    gate=_sizes(320, 64, 96, 2, 4, 2, 16),
    lengths=(7, 3, 11, 2, 5, 16, 9, 4),
    speed=_sizes(1024, 128, 256, 2, 4, 2, 32),
    batches=((2, 64),),
    repeats=2,
)


def request(data: Datums, vocab: int, *, together: bool = False, forward_only: bool = False) -> PackedRequest:
    """Packed with one datum a microbatch, or all in one."""
    packing = PackingConfig(2**30 if together else 4096, 0 if together else 1)
    checked = check("cross_entropy", {}, data[1], vocab_size=vocab)
    return pack(data[0], checked, packing, forward_only=forward_only)


def vector(tensors: Tensors) -> Tensor:
    return torch.cat([tensors[name].double().flatten().cpu() for name in sorted(tensors)])


class Model:
    """One tenant of an engine, with B away from its initial zero."""

    def __init__(self, opened: Engine, name: str, dump: Path | None, rank: int = 8) -> None:
        self._engine, self.id, self._dump, self._steps = opened, name, dump, 0
        opened.create(name, AdapterConfig(rank=rank, alpha=32, seed=3))
        generator = torch.Generator().manual_seed(1)
        for key, values in self.weights().items():
            if "lora_B" in key:
                values.copy_(0.02 * torch.randn(values.shape, generator=generator))

    def weights(self) -> Tensors:
        """By PEFT name; the parameters' own memory."""
        return self._engine.tenants.activate(self.id).weights()

    def call(self, packed: PackedRequest) -> list[Tensor]:
        """`forward_backward`, or `forward`: each datum's logprobs."""
        (outputs,) = self._engine.forward_backward(self.id, [packed])
        if isinstance(outputs, PassFailed):
            raise outputs
        found = {}
        for output in outputs:
            found.update(zip(packed.microbatches[output.index], output.logprobs, strict=True))
        return [torch.from_numpy(found[i].copy()) for i in range(len(found))]

    def step(self) -> Callable[[str], Tensors]:
        """Step; what was dumped, by kind."""
        self._engine.optim_step(self.id, ADAM)
        number, self._steps = self._steps, self._steps + 1
        return lambda kind: gradient_dump.read(self._dump or Path(), self.id, number, kind)


def nats(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference of two lists of datums' logprobs."""
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


def relative_l2(found: Tensors, wanted: Tensors) -> float:
    exact = vector(wanted)
    return float((vector(found) - exact).norm() / exact.norm())


def against_transformers(folder: Path, vocab: int) -> str:
    """The reference's logits against transformers', where there is a transformers that knows Qwen3."""
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError:
        return "transformers is not installed; the reference is plain torch alone"
    logging.disable_progress_bar()
    try:
        theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        theirs = theirs.float().to(device.device())
    except (ValueError, KeyError, OSError) as error:
        return f"transformers {_version('transformers')} could not read the model: {error}"
    tokens = datums((33,), vocab, seed=7)[0][0].to(device.device())
    with torch.no_grad():
        ours = Reference(folder, {}, 0.0).logits(tokens)
        worst = float((theirs(input_ids=tokens[None]).logits[0] - ours).abs().max())
    verdict = "ok" if worst <= TRANSFORMERS_BAR else "**FAILED**"
    return f"logits against transformers {_version('transformers')}: {worst:.1e} ({verdict})"


def gates(folder: Path, dump: Path, size: Size, dtype: Dtype) -> str:
    """One row of the gate table; a cell that fails says FAILED."""
    vocab = size.gate["vocab_size"]
    data = datums(size.lengths, vocab, seed=5)
    zero = datums(size.lengths[:1], vocab, seed=9, weight=0.0)
    with engine.opened(EngineConfig(folder, dump_gradients=dump, dtype=dtype), 0, dist.HashStore()) as opened:
        windows = []
        for split, sizes in SPLITS.items():
            model, start = Model(opened, f"{dtype} {split}", dump), 0
            for n in sizes:
                part = (data[0][start : start + n], data[1][start : start + n]) if n else zero
                model.call(request(part, vocab))
                start += n
            windows.append(vector(model.step()("gradient")))
        same = windows[0].norm() > 0 and all(torch.equal(w, windows[0]) for w in windows)

        model = Model(opened, f"{dtype} against the reference", dump)
        before = {name: t.detach().clone() for name, t in model.weights().items()}
        other = Reference(folder, before, scale=32 / 8)
        wanted = other.accumulate(data)
        scored = model.call(request(data, vocab, together=True, forward_only=True))
        logprobs = model.call(request(data, vocab, together=True))
        forward = all(torch.equal(a, b) for a, b in zip(scored, logprobs, strict=True))
        step = model.step()
        gradient, after = step("gradient"), step("after")
        far, error = nats(logprobs, wanted), relative_l2(gradient, other.gradient())
        error_bar, far_bar, beside_error, beside_far = GRADIENT_BAR, LOGPROB_BAR, "", ""
        if dtype != "float32":
            plain = Reference(folder, before, scale=32 / 8, dtype=DTYPES[dtype])
            plain_far = nats(plain.accumulate(data), wanted)
            plain_error = relative_l2(plain.gradient(), other.gradient())
            error_bar, far_bar = ROUNDING_FACTOR * plain_error, ROUNDING_FACTOR * plain_far
            beside_error, beside_far = f" (plain {plain_error:.1e})", f" (plain {plain_far:.1e})"
        for name, parameter in other.adapter.items():
            parameter.grad = gradient[name].to(parameter.device)
        betas = (ADAM.beta1, ADAM.beta2)
        options: dict[str, Any] = {"betas": betas, "eps": ADAM.eps, "weight_decay": ADAM.weight_decay}
        if ADAM.grad_clip_norm > 0:
            norm = torch.tensor(float(vector(gradient).norm()))
            nn.utils.clip_grads_with_norm_(other.adapter.values(), ADAM.grad_clip_norm, norm)
        torch.optim.AdamW(other.adapter.values(), lr=ADAM.learning_rate, **options).step()
        adamw = max(float((after[n].to(p.device) - p.detach()).abs().max()) for n, p in other.adapter.items())

    def cell(ok: bool, text: str) -> str:
        return text if ok else f"**FAILED: {text}**"

    cells = (
        dtype,
        cell(bool(same), "bit-identical" if same else "differ"),
        cell(forward, "bit-identical" if forward else "differ"),
        cell(error <= error_bar, f"{error:.1e}{beside_error}"),
        cell(far <= far_bar, f"{far:.1e}{beside_far}"),
        cell(adamw <= ADAMW_BAR, f"{adamw:.1e}"),
    )
    return f"| {' | '.join(cells)} |"


def _synchronize() -> None:
    if device.has_gpu():
        torch.cuda.synchronize()


def _peak() -> str:
    if device.has_gpu():
        return f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB (process)"


def speed(folder: Path, size: Size, dtype: Dtype) -> Iterator[str]:
    """Rows of the speed table: forward_backward and a step of LoRA r=16."""
    vocab = size.speed["vocab_size"]
    config = EngineConfig(folder, dtype=dtype, fused_head=True)
    with engine.opened(config, 0, dist.HashStore()) as opened:
        model = Model(opened, "speed", None, rank=16)
        for rows, columns in size.batches:
            packed = request(datums((columns,) * rows, vocab, seed=1, weight=1.0), vocab, together=True)
            if device.has_gpu():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            seconds = []
            cells = [dtype, f"{rows} x {columns}"]
            try:
                for _ in range(size.repeats + 1):  # the first one warms up
                    _synchronize()
                    started = time.perf_counter()
                    model.call(packed)
                    model.step()
                    _synchronize()
                    seconds.append(time.perf_counter() - started)
            except PassFailed as error:
                cells += [f"failed: {str(error).splitlines()[0][:120]}", "", ""]
                yield f"| {' | '.join(cells)} |"
                continue
            middle = sorted(seconds[1:])[len(seconds[1:]) // 2]
            cells += [f"{rows * columns / middle:,.0f}", f"{middle:.3f}", _peak()]
            yield f"| {' | '.join(cells)} |"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def versions() -> Iterator[str]:
    """What the figures depend on, one line each."""
    yield f"Python {platform.python_version()}, torch {torch.__version__}"
    yield f"megatron-core {_version('megatron-core')}; Transformer Engine {_version('transformer-engine')}"
    if not device.has_gpu():
        yield f"no GPU; CPU capability {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
        return
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    yield f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, NCCL {nccl}"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout
        driver = answer.splitlines()[0]
    except (OSError, IndexError, subprocess.SubprocessError) as error:
        driver = f"unknown ({type(error).__name__})"
    yield f"GPU {torch.cuda.get_device_name()}, driver {driver}"


def measure(scratch: Path, *, rehearsal: bool) -> Iterator[str]:
    """The lines of the section."""
    size = REHEARSAL if rehearsal else WHOLE
    yield "## CPU rehearsal: not figures of a GPU" if rehearsal else "## One GPU"
    yield ""
    for line in versions():
        yield f"- {line}"
    # bfloat16 values serve both: the models then have equal weights.
    gate = write_folder(scratch / "gate", size.gate, torch.bfloat16)
    yield f"- reference: {against_transformers(gate, size.gate['vocab_size'])}"
    yield ""
    yield "| dtype | windows | forward = forward_backward | gradient, relative L2 | logprobs, nats | AdamW |"
    yield "|---|---|---|---|---|---|"
    dtypes: tuple[Dtype, ...] = tuple(DTYPES)
    for dtype in dtypes:
        yield gates(gate, scratch / "dumps", size, dtype)
        gc.collect()
    yield ""
    yield "| dtype | datums x tokens | tokens/s | seconds | peak memory |"
    yield "|---|---|---|---|---|"
    folder = write_folder(scratch / "speed", size.speed, torch.bfloat16)
    for dtype in dtypes:
        yield from speed(folder, size, dtype)
        gc.collect()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu-rehearsal", action="store_true", help="a tiny version on the CPU")
    parser.add_argument("--output", type=Path, help="where the section goes as well as to stdout")
    parser.add_argument("--scratch", type=Path, required=True, help="an empty folder for models and dumps")
    arguments = parser.parse_args()
    if arguments.cpu_rehearsal:
        assert not device.has_gpu(), "run scripts/gpu_check, which hides the GPU from a rehearsal"
        torch.set_num_threads(1)
    elif not device.has_gpu():
        print(
            "gpu_check: torch finds no GPU; --cpu-rehearsal runs a tiny version on the CPU", file=sys.stderr
        )
        return 2
    lines = []
    for line in measure(arguments.scratch, rehearsal=arguments.cpu_rehearsal):
        print(line, flush=True)
        lines.append(line)
        if arguments.output is not None:  # each time: what is there survives a time limit
            arguments.output.write_text("\n".join(lines) + "\n")
    return 1 if any("FAILED" in line for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
