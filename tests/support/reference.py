"""A reference nobody here wrote: transformers computes the model, PEFT the adapter, torch the gradient."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeExperts,
    Qwen3MoeSparseMoeBlock,
    Qwen3MoeTopKRouter,
)
from transformers.utils import logging

from loss_hub import DatumInputs
from tests.support import dumps

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
PREFIX = "base_model.model."


def load(folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The folder as transformers reads it, plain attention."""
    logging.disable_progress_bar()
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )
    for module in model.modules():
        if isinstance(module, Qwen3MoeSparseMoeBlock):
            module.experts = Experts(module.experts)
            model.config.model_type = "unfused"  # else PEFT looks for the fused parameters
    return model.eval()


class Expert(torch.nn.Module):
    """SwiGLU out of three linears, as every dense model's MLP is."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        gate, up = gate_up.chunk(2)
        for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            linear.weight.data.copy_(weight)
            setattr(self, name, linear)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return hidden


class Experts(torch.nn.ModuleList):
    """transformers' experts as modules of linears, as folders name them and PEFT adapts them; it fuses them itself."""

    def __init__(self, fused: Qwen3MoeExperts) -> None:
        super().__init__(map(Expert, fused.gate_up_proj, fused.down_proj))

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for number, expert in enumerate(self):
            tokens, places = torch.where(chosen == number)
            if len(tokens):
                out.index_add_(0, tokens, expert(hidden[tokens]) * weights[tokens, places, None])
        return out


def cross_entropy(logprobs: Tensor, inputs: DatumInputs) -> Tensor:
    """−Σ w·lp."""
    return -(inputs.tensors["weights"] * logprobs).sum()


def importance_sampling(logprobs: Tensor, inputs: DatumInputs) -> Tensor:
    """−Σ exp(lp − q)·A."""
    ratio = torch.exp(logprobs - inputs.tensors["logprobs"])
    return -(ratio * inputs.tensors["advantages"]).sum()


LOSSES: dict[str, Callable[[Tensor, DatumInputs], Tensor]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
}


class Reference:
    """A base model of a dtype with one float32 adapter. Parameters go by the names our dumps use."""

    parameters: dict[str, torch.nn.Parameter]

    def __init__(
        self,
        folder: Path,
        rank: int,
        alpha: float = 32,
        targets: Sequence[str] = PROJECTIONS,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        config = peft.LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=list(targets))
        with warnings.catch_warnings():
            # PEFT warns that a tied head does not stay tied: wanted here, the adapter is the output's alone.
            warnings.simplefilter("ignore")
            self.model = peft.get_peft_model(load(folder, dtype), config)
        self.parameters = {
            name.removeprefix(PREFIX).replace(".default.", "."): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }

    @torch.no_grad()
    def set_weights(self, weights: dict[str, Tensor]) -> None:
        assert weights.keys() == self.parameters.keys()
        for name, values in weights.items():
            self.parameters[name].copy_(values)

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def logprobs(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """log softmax at the targets of one datum, (N,) or (N, K)."""
        logits = self.model(input_ids=tokens[None], use_cache=False).logits[0]
        wide = targets if targets.dim() == 2 else targets[:, None]
        return torch.log_softmax(logits.float(), dim=-1).gather(1, wide).reshape(targets.shape)

    @torch.no_grad()
    def router_gap(self, tokens: Tensor) -> float:
        """The smallest difference between the probability of a kept and of a dropped expert, over one datum's tokens
        and layers; infinite without experts. Below rounding two right implementations may choose differently."""
        gaps = [math.inf]

        def look(module: torch.nn.Module, _: Any, output: tuple[Tensor, ...]) -> None:
            probabilities = output[0].softmax(-1).sort(descending=True).values
            gaps.append(float((probabilities[:, module.top_k - 1] - probabilities[:, module.top_k]).min()))

        hooks = [
            module.register_forward_hook(look)
            for module in self.model.modules()
            if isinstance(module, Qwen3MoeTopKRouter)
        ]
        self.model(input_ids=tokens[None], use_cache=False)
        for hook in hooks:
            hook.remove()
        return min(gaps)

    def accumulate(
        self, loss: str, tokens: Sequence[Tensor], inputs: Sequence[DatumInputs]
    ) -> tuple[list[Tensor], float]:
        """Add the datums' gradient to `.grad`, each datum on its own. Returns logprobs and the loss sum."""
        found, total = [], 0.0
        for datum_tokens, datum in zip(tokens, inputs, strict=True):
            logprobs = self.logprobs(datum_tokens, datum.tensors["target_tokens"])
            value = LOSSES[loss](logprobs, datum)
            value.backward()
            found.append(logprobs.detach())
            total += value.item()
        return found, total

    def gradient(self) -> dict[str, Tensor]:
        """What `accumulate` gathered, zeros where nothing came; gathered anew afterwards."""
        out = {}
        for name, parameter in self.parameters.items():
            out[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            parameter.grad = None
        return out


class FullReference(Reference):
    """A model of which every parameter trains."""

    def __init__(self, folder: Path) -> None:
        self.model = load(folder)
        self.parameters = dict(self.model.named_parameters())


def worst(found: Sequence[Tensor] | Sequence[object], wanted: Sequence[Tensor]) -> float:
    """The largest absolute difference over all datums; shapes must agree."""
    errors = []
    for ours, theirs in zip(found, wanted, strict=True):
        ours = torch.as_tensor(ours)
        assert ours.shape == theirs.shape
        errors.append(float((ours - theirs).abs().max()))
    return max(errors)


def assert_gradients_agree(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Within 5e-6 relative L2 as one vector, and no tensor that matters far off on its own."""
    assert ours.keys() == theirs.keys()
    whole = dumps.vector(theirs)
    assert dumps.relative_l2(dumps.vector(ours), whole) <= 5e-6
    for name, wanted in theirs.items():
        if wanted.norm() > 1e-3 * whole.norm():
            assert dumps.relative_l2(ours[name], wanted) <= 2e-5, name
