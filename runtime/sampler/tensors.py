"""Numbers of the engine as tensors of the bus."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from bus.events import DType, Tensor, TopLogprobs


def int32(numbers: torch.Tensor | Sequence[int], shape: tuple[int, ...] | None = None) -> Tensor:
    return _tensor(numbers, "int32", shape)


def float32(numbers: torch.Tensor | Sequence[float], shape: tuple[int, ...] | None = None) -> Tensor:
    return _tensor(numbers, "float32", shape)


def top(ids_N_K: torch.Tensor, logprobs_N_K: torch.Tensor) -> TopLogprobs:
    return TopLogprobs(token_ids=int32(ids_N_K), logprobs=float32(logprobs_N_K))


def _tensor(numbers: torch.Tensor | Sequence[float], dtype: DType, shape: tuple[int, ...] | None) -> Tensor:
    array = np.asarray(numbers, dtype=np.dtype(dtype).newbyteorder("<"))
    return Tensor(dtype=dtype, shape=shape or tuple(array.shape), data=array.tobytes())
