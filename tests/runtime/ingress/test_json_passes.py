"""`forward` and `forward_backward` as JSON: the same operations and results as protobuf gives."""

from __future__ import annotations

from typing import Any

import pytest

from bus.events import ForwardBackward
from runtime.ingress.json_passes import wanted
from tests.runtime.ingress.conftest import Wire, sdk_body
from tests.runtime.stand_in import Service

READS_JSON = {"accept": "application/json"}


def tensor(data: list[Any], dtype: str, **more: Any) -> dict[str, Any]:
    return {"data": data, "dtype": dtype, **more}


def batch(*targets: int, **changes: Any) -> dict[str, Any]:
    datum = {
        "model_input": {"chunks": [{"tokens": list(targets), "type": "encoded_text"}]},
        "loss_fn_inputs": {
            "target_tokens": tensor(list(targets), "int64", shape=[len(targets)]),
            "weights": tensor([1.0] * len(targets), "float32"),
        },
    }
    return {"data": [datum], "loss_fn": "cross_entropy", "loss_fn_config": None, **changes}


async def fetched(wire: Wire, future: Any) -> Any:
    assert future.status_code == 200, future.text
    await wire.result(future)
    body = {"request_id": future.json()["request_id"]}
    return (await wire.post("retrieve_future", body, headers=READS_JSON)).json()


async def send(wire: Wire, model: str, seq: int, sent: dict[str, Any], verb: str = "forward_backward") -> Any:
    name = "forward_input" if verb == "forward" else "forward_backward_input"
    return await wire.post(verb, {"model_id": model, "seq_id": seq, name: sent})


async def test_json_and_protobuf_are_the_same_operation(alice: Wire, service: Service) -> None:
    model = await alice.model()
    await alice.result(await send(alice, model, 1, batch(8, 16)))
    await alice.result(await alice.forward_backward(sdk_body(model, 2, [8, 16])))
    ops = []
    for seq in (1, 2):
        entry = await service.log.get(model, seq)
        assert entry is not None
        ops.append(entry.op())
    assert isinstance(ops[0], ForwardBackward)
    assert ops[0] == ops[1]


async def test_a_result_is_json_for_who_reads_no_protobuf(alice: Wire) -> None:
    model = await alice.model()
    done = await fetched(alice, await send(alice, model, 1, batch(8, 16, 24)))
    assert done["loss_fn_output_type"] == "ArrayRecord"
    assert done["loss_fn_outputs"] == [
        {"logprobs": {"data": [-1.0, -2.0, -3.0], "dtype": "float32", "shape": [3]}}
    ]
    assert done["metrics"] == {"loss:sum": 6.0, "forward_only:max": 0.0}


async def test_forward_leaves_the_gradient_alone(alice: Wire) -> None:
    model = await alice.model()
    done = await fetched(alice, await send(alice, model, 1, batch(8), "forward"))
    assert done["metrics"] == {"loss:sum": 1.0, "forward_only:max": 1.0}


async def test_a_sparse_tensor_is_dense_on_the_log(alice: Wire, service: Service) -> None:
    model = await alice.model()
    sent = batch(8, 16)
    sparse = {"shape": [2, 3], "sparse_crow_indices": [0, 1, 3], "sparse_col_indices": [2, 0, 1]}
    sent["data"][0]["loss_fn_inputs"]["weights"] = tensor([1.0, 2.0, 3.0], "float32", **sparse)
    await alice.result(await send(alice, model, 1, sent))
    entry = await service.log.get(model, 1)
    assert entry is not None
    op = entry.op()
    assert isinstance(op, ForwardBackward)
    weights: Any = op.data[0].loss_fn_inputs["weights"]
    assert weights.shape == (2, 3)
    assert list(memoryview(weights.data).cast("f")) == [0, 0, 1, 2, 3, 0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data": []}, "data is empty"),
        ({"loss_fn": None}, "loss_fn"),
        ({"micro_batches": 2}, "micro_batches"),
        (
            {"data": [{"model_input": {"chunks": [{"type": "image", "data": ""}]}, "loss_fn_inputs": {}}]},
            "chunks",
        ),
        (
            {"data": [{"model_input": {"chunks": []}, "loss_fn_inputs": {"weights": tensor([1], "int8")}}]},
            "dtype",
        ),
        (
            {
                "data": [
                    {"model_input": {"chunks": []}, "loss_fn_inputs": {"weights": tensor([0.5], "int64")}}
                ]
            },
            "whole numbers",
        ),
        (
            {
                "data": [
                    {
                        "model_input": {"chunks": []},
                        "loss_fn_inputs": {"weights": tensor([1.0], "float32", shape=[2])},
                    }
                ]
            },
            "shape [2]",
        ),
    ],
)
async def test_what_cannot_be_honoured_fails_alone_and_uses_up_its_number(
    alice: Wire, changes: dict[str, Any], says: str
) -> None:
    model = await alice.model()
    refused = await send(alice, model, 1, batch(8, **changes))
    after = await send(alice, model, 2, batch(8))
    assert says in await alice.error(refused)
    assert (await fetched(alice, after))["metrics"]["loss:sum"] == 1.0


@pytest.mark.parametrize(
    ("accept", "json"),
    [
        ("application/json", True),
        ("application/json; q=0.9", True),
        ("application/x-protobuf", False),
        ("application/json, application/x-protobuf", False),
        ("*/*", False),
        ("", False),
    ],
)
def test_who_accepts_json_alone_gets_it(accept: str, json: bool) -> None:
    assert wanted(accept) is json
