"""Short words for the official SDK, and the same datums for event clients."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import tinker
import torch
from tinker import types

from bus.events import Datum, Tensor
from tests.support.service import Service

WAIT_S = 120


def service_client(service: Service) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=service.http, api_key=service.api_key)


def training_client(
    service: Service, *, rank: int = 8, seed: int = 3, user_metadata: dict[str, str] | None = None
) -> tinker.TrainingClient:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        future = service_client(service).create_lora_training_client(
            base_model="tiny", rank=rank, seed=seed, user_metadata=user_metadata
        )
        return future.result(timeout=WAIT_S)


def model_id(client: tinker.TrainingClient) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        found: str = client.get_info().model_id
    return found


def sdk_datum(tokens: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens.tolist()),
        loss_fn_inputs={name: types.TensorData.from_torch(t) for name, t in inputs.items()},
    )


def bus_datum(tokens: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> Datum:
    return Datum(
        model_input=_tensor(tokens), loss_fn_inputs={name: _tensor(tensor) for name, tensor in inputs.items()}
    )


def _tensor(tensor: torch.Tensor) -> Tensor:
    dtype = "float32" if tensor.is_floating_point() else "int64"
    values = tensor.numpy().astype(np.dtype(dtype).newbyteorder("<"))
    return Tensor(dtype=dtype, shape=tuple(values.shape), data=values.tobytes())  # type: ignore[arg-type]


def logprobs(output: types.ForwardBackwardOutput) -> list[torch.Tensor]:
    return [record["logprobs"].to_torch() for record in output.loss_fn_outputs]


def equal(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))
