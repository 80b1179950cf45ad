"""Refusals before anything runs: the field, the value and the limit, and nothing for what is right."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from actors.contract import AdapterConfig, FullConfig
from actors.models.spec import ModelSpec
from bus.events import AdamParams, CreateModel, Datum, ForwardBackward, LoraConfig, LossChoice, Tensor
from runtime import checks
from runtime.checks import Refusal
from runtime.config import Limits, Settings

SPEC = ModelSpec(
    family="qwen3",
    vocab_size=320,
    hidden_size=64,
    ffn_hidden_size=128,
    num_layers=1,
    num_attention_heads=2,
    num_query_groups=1,
    head_dim=32,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    context_length=16,
    tied_embeddings=True,
    qk_norm=True,
    qkv_bias=False,
)
SETTINGS = Settings()


def ints(*values: int, dtype: str = "int64") -> Tensor:
    width = {"int64": 8, "int32": 4}[dtype]
    data = b"".join(v.to_bytes(width, "little", signed=True) for v in values)
    return Tensor(dtype=dtype, shape=(len(values),), data=data)  # type: ignore[arg-type]


def request(model_input: Any, loss: str = "cross_entropy", **inputs: Any) -> ForwardBackward:
    datum = Datum(model_input=model_input, loss_fn_inputs=inputs)
    return ForwardBackward(data=(datum,), loss=LossChoice(name=loss))


@pytest.mark.parametrize("model_input", [(1, 2, 3), ints(1, 2, 3), ints(1, 2, 3, dtype="int32")])
@pytest.mark.parametrize("targets", [(2, 3, 4), ints(2, 3, 4)])
def test_plain_lists_and_tensors_of_either_width_mean_the_same(model_input: Any, targets: Any) -> None:
    batch = checks.batch(request(model_input, target_tokens=targets, weights=(1, 0.5, 0)), SPEC, SETTINGS)
    assert torch.equal(batch.tokens[0], torch.tensor([1, 2, 3]))
    assert batch.tokens[0].dtype == torch.int64
    assert torch.equal(batch.request.tensors[0]["target_tokens"], torch.tensor([2, 3, 4]))
    assert torch.equal(batch.request.tensors[0]["weights"], torch.tensor([1, 0.5, 0]))


@pytest.mark.parametrize(
    ("op", "field", "words"),
    [
        (request((1, 320), target_tokens=(1, 2)), "data[0].model_input", ("320", "319")),
        (request((1, -1), target_tokens=(1, 2)), "data[0].model_input", ("-1",)),
        (request((), target_tokens=()), "data[0].model_input", ("0 tokens", "between 1 and 16")),
        (request((1,) * 17, target_tokens=(1,) * 17), "data[0].model_input", ("17", "16")),
        (request((1.5, 2), target_tokens=(1, 2)), "data[0].model_input", ("token ids",)),
        (
            request(Tensor(dtype="float32", shape=(1,), data=bytes(4)), target_tokens=(1,)),
            "data[0].model_input",
            ("float32",),
        ),
        (
            request(Tensor(dtype="int32", shape=(1, 1), data=bytes(4)), target_tokens=(1,)),
            "data[0].model_input",
            ("(1, 1)",),
        ),
        (request((1, 2), target_tokens=(1,)), "data[0].loss_fn_inputs.target_tokens", ("1", "2")),
        (request((1, 2), loss="none", target_tokens=(1, 2)), "loss.name", ("none", "cross_entropy")),
        (ForwardBackward(data=(), loss=LossChoice(name="cross_entropy")), "data", ("at least one",)),
    ],
)
def test_a_batch_that_cannot_run_is_refused_by_field(
    op: ForwardBackward, field: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(Refusal) as caught:
        checks.batch(op, SPEC, SETTINGS)
    assert caught.value.field == field
    for word in (field, *words):
        assert word in caught.value.error


def test_limits_of_the_configuration_hold() -> None:
    settings = Settings(limits=Limits(max_datum_tokens=2, max_datums_per_request=1))
    with pytest.raises(Refusal, match="between 1 and 2"):
        checks.batch(request((1, 2, 3), target_tokens=(1, 2, 3)), SPEC, settings)
    op = request((1,), target_tokens=(1,))
    with pytest.raises(Refusal, match="2 datums; the limit is 1"):
        checks.batch(replace(op, data=op.data * 2), SPEC, settings)


def test_an_adapter_is_what_was_asked_for_and_the_servers_alpha() -> None:
    op = CreateModel(base_model="tiny", lora=LoraConfig(rank=8, seed=7, train_mlp=False))
    wanted = AdapterConfig(rank=8, alpha=32.0, seed=7, train_attn=True, train_mlp=False, train_unembed=True)
    assert checks.training(op, SETTINGS) == wanted


def test_without_an_adapter_every_parameter_trains() -> None:
    assert checks.training(CreateModel(base_model="tiny"), SETTINGS) == FullConfig()


def test_a_bfloat16_base_takes_adapters_alone() -> None:
    settings = Settings(dtype="bfloat16")
    checks.training(CreateModel(base_model="tiny", lora=LoraConfig(rank=8)), settings)
    with pytest.raises(
        Refusal, match="needs a float32 base model, and this server's dtype is bfloat16"
    ) as caught:
        checks.training(CreateModel(base_model="tiny"), settings)
    assert caught.value.field == "lora"


@pytest.mark.parametrize(
    ("op", "field"),
    [
        (CreateModel(base_model="other", lora=LoraConfig(rank=8)), "base_model"),
        (CreateModel(base_model="tiny", lora=LoraConfig(rank=0)), "lora.rank"),
        (CreateModel(base_model="tiny", lora=LoraConfig(rank=129)), "lora.rank"),
        (
            CreateModel(
                base_model="tiny",
                lora=LoraConfig(rank=8, train_attn=False, train_mlp=False, train_unembed=False),
            ),
            "lora",
        ),
    ],
)
def test_a_model_that_cannot_be_created_is_refused_by_field(op: CreateModel, field: str) -> None:
    with pytest.raises(Refusal) as caught:
        checks.training(op, SETTINGS)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", -1e-3),
        ("learning_rate", math.inf),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("eps", 0.0),
        ("weight_decay", math.nan),
        ("grad_clip_norm", -1.0),
    ],
)
def test_hyperparameters_that_adamw_would_not_take_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(Refusal, match=f"adam_params.{name} is {value}") as caught:
        checks.adam_params(replace(AdamParams(), **{name: value}))
    assert caught.value.field == f"adam_params.{name}"


def test_the_sdks_defaults_pass() -> None:
    assert checks.adam_params(AdamParams()) == AdamParams()
