"""A weight transform on a whole model: which weights it touches, and its values in their place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor, nn

from actors import weights
from actors.models.spec import ModelSpec
from actors.transforms.fake_int4 import FakeInt4, quantize
from actors.transforms.plan import touched


@dataclass(frozen=True, slots=True)
class _Touched:
    parameter: nn.Parameter
    entry: weights.Entry
    chosen: tuple[bool, ...]
    """Which of the entry's sources are quantized: Megatron fuses what Hugging Face keeps apart."""


class QuantizedWeights:
    """Fake INT4 on the chunks of one model.

    A pass computes with the quantized values while the parameters keep their own, which a step changes: their
    gradient is the quantized weights' gradient, unchanged (straight-through). The values are computed once after
    each step.
    """

    def __init__(self, chunks: Sequence[GPTModel], spec: ModelSpec, config: FakeInt4) -> None:
        self._spec, self._config = spec, config
        self._touched = [found for chunk in chunks for found in self._find(chunk)]
        self._values: list[Tensor] | None = None

    def _find(self, chunk: GPTModel) -> Iterator[_Touched]:
        parameters = dict(chunk.named_parameters())
        names = {f"{linear.name}.weight" for linear in touched(self._config, self._spec)}
        for entry in weights.entries(chunk, self._spec):
            parameter = parameters[entry.parameter]
            chosen = tuple(source.name in names for source in entry.sources)
            if any(chosen):
                yield _Touched(parameter, entry, chosen)

    @torch.no_grad()
    def _quantized(self, one: _Touched) -> Tensor:
        parts = weights.parted(one.entry, one.parameter.detach(), self._spec)
        config = self._config
        new = [
            quantize(part, config.convention, config.group_size) if chosen else part
            for part, chosen in zip(parts, one.chosen, strict=True)
        ]
        return weights.joined(one.entry.join, new, self._spec)

    @torch.no_grad()
    def bake(self) -> None:
        """Put the values into the parameters for good: for a base model that nothing trains."""
        for one in self._touched:
            one.parameter.copy_(self._quantized(one))

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Within it the model computes with the quantized values; nothing may write to its weights."""
        if self._values is None:
            self._values = [self._quantized(one) for one in self._touched]
        own = [one.parameter.data for one in self._touched]
        try:
            for one, values in zip(self._touched, self._values, strict=True):
                one.parameter.data = values
            yield
        finally:
            for one, data in zip(self._touched, own, strict=True):
                one.parameter.data = data

    def stale(self) -> None:
        """The weights have changed."""
        self._values = None
