"""The gates of one rank in float32 and bfloat16, and a speed figure: `scripts/gpu_check`, described in docs/gpu.md.

Needs torch, megatron-core, msgspec, safetensors and numpy alone. The reference is Qwen3 with LoRA in plain torch,
written here; where transformers is importable, that reference is held to it.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
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
from safetensors.torch import save_file
from torch import Tensor, nn

from actors import device, engine, gradient_dump
from actors.engine import Engine, EngineConfig
from actors.lora import AdapterConfig
from actors.models.build import DTYPES, Dtype
from actors.packing import PackedRequest, PackingConfig, pack
from actors.window import PassFailed
from bus.events import AdamParams
from loss_hub import DatumInputs, check

Tensors = dict[str, Tensor]
Datums = tuple[list[Tensor], list[DatumInputs]]

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


def write_folder(folder: Path, sizes: dict[str, int], dtype: torch.dtype) -> Path:
    """A random Qwen3 with tied embeddings as a Hugging Face folder, written with torch alone."""
    config = {
        **sizes,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "tie_word_embeddings": True,
        "attention_bias": False,
    }
    hidden, ffn, head = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    q, kv = sizes["num_attention_heads"] * head, sizes["num_key_value_heads"] * head
    linears = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    norms |= {"self_attn.q_norm": head, "self_attn.k_norm": head}
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    tensors = {"model.embed_tokens.weight": noise(sizes["vocab_size"], hidden) / hidden**0.5}
    tensors["model.norm.weight"] = 1 + 0.2 * noise(hidden)
    for layer in range(sizes["num_hidden_layers"]):
        for name, shape in linears.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = noise(*shape) / shape[1] ** 0.5
        for name, width in norms.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = 1 + 0.2 * noise(width)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    values = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def datums(lengths: tuple[int, ...], vocab: int, seed: int, weight: float | None = None) -> Datums:
    """Random datums for cross_entropy; weights are random of either sign unless `weight` is given."""
    generator = torch.Generator().manual_seed(seed)
    tokens, inputs = [], []
    for n in lengths:
        full = torch.randint(0, vocab, (n + 1,), generator=generator)
        weights = torch.randn(n, generator=generator) if weight is None else torch.full((n,), weight)
        tokens.append(full[:-1])
        inputs.append(DatumInputs(n, {"target_tokens": full[1:], "weights": weights}))
    return tokens, inputs


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


class Reference:
    """Qwen3 with a LoRA adapter on every linear and the head, one datum at a time, in plain torch.

    `dtype` is the base's, as `EngineConfig.dtype`. The adapter's parameters, norms, softmaxes and logprobs are float32.
    """

    def __init__(
        self, folder: Path, adapter: Tensors, scale: float, dtype: torch.dtype = torch.float32
    ) -> None:
        from safetensors.torch import load_file

        where = device.device()
        self.config = json.loads((folder / "config.json").read_text())
        self._base = {name: t.to(where, dtype) for name, t in load_file(folder / "model.safetensors").items()}
        self._base["lm_head.weight"] = self._base["model.embed_tokens.weight"]
        self.adapter = {name: nn.Parameter(t.detach().clone().to(where)) for name, t in adapter.items()}
        self._scale = scale

    def _linear(self, name: str, x: Tensor) -> Tensor:
        out = x @ self._base[f"{name}.weight"].t()
        if not self.adapter:
            return out
        a, b = (self.adapter[f"{name}.lora_{half}.weight"].to(x.dtype) for half in "AB")
        return out + self._scale * (x @ a.t() @ b.t())

    def _norm(self, name: str, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return self._base[f"{name}.weight"] * normed.to(x.dtype)

    def _attention(self, name: str, x: Tensor) -> Tensor:
        n, head = x.shape[0], self.config["head_dim"]
        q, k, v = (self._linear(f"{name}.{p}_proj", x).view(n, -1, head).transpose(0, 1) for p in "qkv")
        powers = torch.arange(0, head, 2, device=x.device).float() / head
        angles = torch.arange(n, device=x.device)[:, None] / self.config["rope_theta"] ** powers
        angles = torch.cat([angles, angles], dim=-1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)

        def rotated(t: Tensor) -> Tensor:
            one, two = t.chunk(2, dim=-1)
            return t * cos + torch.cat([-two, one], dim=-1) * sin

        q, k = rotated(self._norm(f"{name}.q_norm", q)), rotated(self._norm(f"{name}.k_norm", k))
        k, v = (t.repeat_interleave(q.shape[0] // k.shape[0], dim=0) for t in (k, v))
        later = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.transpose(1, 2) / head**0.5).float().masked_fill(later, -torch.inf)
        mixed = (scores.softmax(-1).to(v.dtype) @ v).transpose(0, 1).reshape(n, -1)
        return self._linear(f"{name}.o_proj", mixed)

    def logits(self, tokens: Tensor) -> Tensor:
        """(N, vocabulary) of one datum's tokens (N,)."""
        x = self._base["model.embed_tokens.weight"][tokens.to(device.device())]
        for number in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{number}"
            x = x + self._attention(f"{name}.self_attn", self._norm(f"{name}.input_layernorm", x))
            y = self._norm(f"{name}.post_attention_layernorm", x)
            gate, up = (self._linear(f"{name}.mlp.{p}_proj", y) for p in ("gate", "up"))
            x = x + self._linear(f"{name}.mlp.down_proj", nn.functional.silu(gate) * up)
        return self._linear("lm_head", self._norm("model.norm", x))

    def accumulate(self, data: Datums) -> list[Tensor]:
        """Add the datums' cross-entropy gradient to the adapter's `.grad`; their logprobs."""
        found = []
        for tokens, inputs in zip(*data, strict=True):
            targets = inputs.tensors["target_tokens"].to(device.device())
            logprobs = self.logits(tokens).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
            (-(inputs.tensors["weights"].to(logprobs.device) * logprobs).sum()).backward()
            found.append(logprobs.detach().cpu())
        return found

    def gradient(self) -> Tensors:
        return {name: p.grad for name, p in self.adapter.items() if p.grad is not None}


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
