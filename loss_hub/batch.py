"""What a loss sees: the tokens of one microbatch, flat, datum after datum, without padding."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loss_hub.specs import ADVANTAGES, ROLLOUT_LOGPROBS, SEQUENCE_RATIO_MASK, TARGETS, WEIGHTS


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """The loss inputs of one microbatch, N tokens in all.

    Tensors that stand beside targets are (N,) when every datum has one target a position, else (N, K) with
    K the largest of the batch; a datum with fewer targets is filled up with target 0, weight 0.
    """

    lengths: tuple[int, ...]
    """Tokens of each datum, in order; they add up to N."""
    ks: tuple[int | None, ...]
    """Targets per position of each datum; None where its `target_tokens` is 1-D."""
    tensors: dict[str, Tensor]
    """By name of the input: int64 or float32."""

    @property
    def targets_N(self) -> Tensor:
        return self.tensors[TARGETS.name]

    @property
    def weights_N(self) -> Tensor:
        return self.tensors[WEIGHTS.name]

    @property
    def rollout_logprobs_N(self) -> Tensor:
        return self.tensors[ROLLOUT_LOGPROBS.name]

    @property
    def advantages_N(self) -> Tensor:
        return self.tensors[ADVANTAGES.name]

    @property
    def sequence_ratio_mask_N(self) -> Tensor:
        return self.tensors[SEQUENCE_RATIO_MASK.name]

    def weighted(self) -> Tensor:
        """Where the weight is not 0: bool, shaped like the targets."""
        return self.weights_N != 0

    def advantaged_N(self) -> Tensor:
        """Where the advantage is not 0: bool."""
        return self.advantages_N != 0

    def rolled_out_N(self) -> Tensor:
        """Where the sampler wrote the token: bool. Prompt positions carry advantage 0 and logprob 0.

        A sampled token may have advantage 0, then its logprob tells it from the prompt; a logprob that is
        not finite says that nobody measured it.
        """
        q_N = self.rollout_logprobs_N
        return self.advantaged_N() | ((q_N != 0) & torch.isfinite(q_N))

    def only(self, part: Tensor) -> BatchInputs:
        """The same batch with 0 in every float tensor outside `part` (bool, shaped like the targets)."""
        return replace(
            self,
            tensors={
                name: torch.where(part, tensor, torch.zeros_like(tensor))
                if tensor.is_floating_point() and tensor.shape == part.shape
                else tensor
                for name, tensor in self.tensors.items()
            },
        )

    def sums_D(self, values_N: Tensor) -> Tensor:
        """Of each of the D datums the sum over its tokens, (D,) float64.

        Summed datum by datum: what else stands in the microbatch changes no bit of it.
        """
        return torch.stack([part.double().sum() for part in torch.split(values_N, list(self.lengths))])

    def spread_N(self, values_D: Tensor) -> Tensor:
        """One value a datum, (D,), at each of its tokens, (N,)."""
        return torch.cat([value.expand(n) for value, n in zip(values_D, self.lengths, strict=True)])

    def split(self, values_N: Tensor) -> tuple[Tensor, ...]:
        """`values_N`, shaped like the targets, as one tensor a datum, each shaped like its own targets."""
        parts = torch.split(values_N, list(self.lengths))
        if values_N.dim() == 1:
            return parts
        return tuple(part[:, 0] if k is None else part[:, :k] for part, k in zip(parts, self.ks, strict=True))

    def to(self, device: torch.device | str) -> BatchInputs:
        """The same batch on another device."""
        return replace(self, tensors={name: tensor.to(device) for name, tensor in self.tensors.items()})
