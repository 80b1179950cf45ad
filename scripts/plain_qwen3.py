"""Qwen3 with LoRA in plain torch autograd, and random models and data for it: what `gpu_check` is held to.

The model shares no code with the engine but the name of the device.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from actors import device
from loss_hub import DatumInputs

Tensors = dict[str, Tensor]
Datums = tuple[list[Tensor], list[DatumInputs]]


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


class Reference:
    """Qwen3 with a LoRA adapter on every linear and the head, one datum at a time, in plain torch.

    `dtype` is the base's, as `EngineConfig.dtype`. The adapter's parameters, norms, softmaxes and logprobs are float32.
    """

    def __init__(
        self, folder: Path, adapter: Tensors, scale: float, dtype: torch.dtype = torch.float32
    ) -> None:
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
