"""torch's AdamW and torch's clipping, fed gradients and hyperparameters step by step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bus.events import AdamParams


class TorchAdamW:
    """Parameters of its own, float32, stepped by `torch.optim.AdamW`.

    `norm_dtype` is the precision in which torch adds up the norm that it clips by. torch's default is the
    gradients' float32; which way its last bit falls then depends on the order of the parameters.
    """

    def __init__(self, weights: dict[str, Tensor], norm_dtype: torch.dtype = torch.float64) -> None:
        self.parameters = {name: nn.Parameter(values.clone()) for name, values in weights.items()}
        self.optimizer = torch.optim.AdamW(self.parameters.values())
        self._norm_dtype = norm_dtype

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.data.copy_(weights[name])

    def step(self, gradient: dict[str, Tensor], adam: AdamParams) -> dict[str, Tensor]:
        """Clip, step, and return the weights."""
        for name, parameter in self.parameters.items():
            parameter.grad = gradient[name].clone()
        if adam.grad_clip_norm > 0:
            gradients = [gradient[name].to(self._norm_dtype) for name in self.parameters]
            norm = torch.nn.utils.get_total_norm(gradients)
            torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), adam.grad_clip_norm, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = adam.learning_rate
            group["betas"] = (adam.beta1, adam.beta2)
            group["eps"] = adam.eps
            group["weight_decay"] = adam.weight_decay
        self.optimizer.step()
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def moment(self, kind: str) -> dict[str, Tensor]:
        """`exp_avg` or `exp_avg_sq` by name; empty before the first step."""
        state = self.optimizer.state
        return {name: state[p][kind].clone() for name, p in self.parameters.items() if p in state}


def difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest absolute difference of any element."""
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)
