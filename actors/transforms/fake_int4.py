"""Fake INT4: weights rounded to the values that an INT4 deployment of the model will have, kept in their dtype.

Symmetric groups along the input dimension share a scale. With amax the largest magnitude in a group,

    scale = bf16(fp32(amax) / d)        q = clamp(round(w / scale), qmin, 7)        result = q · scale

where (d, qmin) is (7.5, −8) in convention "rtn" and (7, −7) in "kimi", and round takes halves to even. A group of
zeros stays zero; a last group that is too short counts as padded with zeros. "kimi" maps what it gives, in float32,
to itself; "rtn" does not, since its largest weight comes out as 7 or −8 scales and not 7.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, get_args

import torch
from torch import Tensor

Convention = Literal["rtn", "kimi"]

QMAX = 7
_DIVISOR_AND_QMIN: dict[Convention, tuple[float, int]] = {"rtn": (7.5, -8), "kimi": (7.0, -7)}

GROUP_SIZE = 32


@dataclass(frozen=True, slots=True)
class FakeInt4:
    """Which weights of a base model are quantized, and how."""

    convention: Convention
    modules: tuple[str, ...] = ("model.layers.*.mlp.experts.*",)
    """`fnmatch` patterns of Hugging Face module names (no ".weight"); `*` also crosses dots. By default the experts
    of MoE layers, without router and shared experts."""
    group_size: int = GROUP_SIZE
    """Neighbouring input features that share a scale."""

    def __post_init__(self) -> None:
        if self.convention not in get_args(Convention):
            raise ValueError(f'fake_int4.convention is {self.convention!r}; it must be "rtn" or "kimi"')
        patterns = self.modules if isinstance(self.modules, tuple) else ()
        if not patterns or not all(isinstance(p, str) and p for p in patterns):
            raise ValueError(
                f"fake_int4.modules is {self.modules!r}; it must be a tuple of at least one pattern, "
                'such as "model.layers.*.mlp.experts.*"'
            )
        size = self.group_size
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"fake_int4.group_size is {size!r}; it must be a whole number of at least 1")


def matches(config: FakeInt4, hf_module_name: str) -> bool:
    """Whether the module's weight is quantized."""
    return any(fnmatchcase(hf_module_name, pattern) for pattern in config.modules)


def check_tp_alignment(in_features: int, tp: int, group_size: int, name: str) -> None:
    """Refuse a row-parallel weight whose split over `tp` ranks would cut through a group.

    Column-parallel weights are split by rows and need no check.

    Raises:
        ValueError: names the layer and the sizes.
    """
    if tp > 1 and in_features % (tp * group_size):
        raise ValueError(
            f"fake_int4 cannot quantize {name} at tp={tp}: its {in_features} input features make "
            f"{in_features / tp:g} a rank, not a multiple of the group size {group_size}, so a group would "
            "straddle two ranks"
        )


@torch.no_grad()
def quantize(weight: Tensor, convention: Convention, group_size: int = GROUP_SIZE) -> Tensor:
    """The quantized values of `weight` (…, in), in its dtype and in memory of its own.

    Weights that are not finite stay visible: their whole group becomes NaN. Magnitudes within 7 % of the largest
    one the dtype holds may overflow to infinity.
    """
    divisor, qmin = _DIVISOR_AND_QMIN[convention]
    short = -weight.shape[-1] % group_size
    padded = torch.nn.functional.pad(weight.float(), (0, short))
    groups = padded.unflatten(-1, (-1, group_size))
    amax = groups.abs().amax(dim=-1, keepdim=True)
    # A divisor that is a tensor: by a Python number a GPU multiplies with the reciprocal, which rounds differently.
    scale = (amax / torch.full_like(amax, divisor)).bfloat16().float()
    q = torch.where(scale == 0, 0.0, (groups / scale).round_().clamp_(qmin, QMAX))
    return (q * scale).flatten(-2)[..., : weight.shape[-1]].to(weight.dtype, copy=True)
