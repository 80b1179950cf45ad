"""Request bodies, without a server."""

from __future__ import annotations

import pytest
import zstandard
from fastapi import HTTPException

from bus.errors import CodecError
from runtime.ingress import requests
from runtime.ingress.body import unzstd


def refusal(body: bytes, limit: int) -> HTTPException:
    with pytest.raises(HTTPException) as caught:
        unzstd(body, limit)
    return caught.value


def test_zstd_is_undone_up_to_the_limit_and_not_a_byte_further() -> None:
    body = bytes(range(256)) * 4096
    packed = zstandard.compress(body)
    assert unzstd(packed, len(body)) == body
    assert refusal(packed, len(body) - 1).status_code == 413


def test_a_zstd_bomb_is_refused_without_being_unpacked() -> None:
    bomb = zstandard.compress(bytes(1 << 30))
    assert len(bomb) < 100_000
    assert refusal(bomb, 1 << 20).status_code == 413


@pytest.mark.parametrize(
    "broken",
    [b"", b"not zstd", zstandard.compress(b"x" * 100)[:-3], zstandard.compress(b"x" * 100) + b"more"],
    ids=["empty", "something else", "cut short", "with a tail"],
)
def test_what_is_not_one_zstd_frame_is_refused(broken: bytes) -> None:
    error = refusal(broken, 1000)
    assert error.status_code == 400
    assert "zstd" in str(error.detail)


OPTIM = {"model_id": "m", "seq_id": 1, "type": "optim_step"}
CREATE = {
    "session_id": "s",
    "model_seq_id": 0,
    "base_model": "tiny",
    "lora_config": {"rank": 4},
    "type": "create_model",
}


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({**OPTIM}, "adam_params", "missing"),
        ({**OPTIM, "adam_params": {"nesterov": True}}, "adam_params.nesterov", "not a field"),
        ({**OPTIM, "adam_params": {"beta1": "0.9"}}, "adam_params.beta1", "expected `float`, got `str`"),
        ({**OPTIM, "adam_params": {}, "foo": 1}, "foo", "not a field"),
        (
            {**OPTIM, "optimizer_params": {"type": "dimuon", "learning_rate": 1}},
            "optimizer_params.type",
            "dimuon",
        ),
        ({**OPTIM, "optimizer_params": {"type": "adamw", "rho": 1}}, "optimizer_params.rho", "not a field"),
        ({**OPTIM, "adam_params": {}, "optimizer_params": {"type": "adamw"}}, "optimizer_params", "both"),
        ({**OPTIM, "adam_params": {}, "type": "step"}, "type", "step"),
    ],
)
def test_an_optim_step_that_cannot_be_honoured_names_the_field(fields: dict, field: str, says: str) -> None:
    with pytest.raises(CodecError) as caught:
        requests.optim_step(fields)
    assert caught.value.field == field
    assert field in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, "optimizer_config.type"),
        ({"optimizer_config": {"type": "adamw", "fused": True}}, "optimizer_config.fused"),
        ({"lora_config": {"rank": 8, "alpha": 16}}, "lora_config.alpha"),
        ({"lora_config": {}}, "lora_config.rank"),
        ({"lora_config": {"rank": 8.5}}, "lora_config.rank"),
        ({"lora_config": None}, "lora_config"),
        ({"user_metadata": {requests.TRAINING: "qlora"}}, f"user_metadata.{requests.TRAINING}"),
        ({"base_model": None}, "base_model"),
        ({"moe": True}, "moe"),
    ],
)
def test_a_create_model_that_cannot_be_honoured_names_the_field(change: dict, field: str) -> None:
    with pytest.raises(CodecError) as caught:
        requests.create_model({**CREATE, **change})
    assert caught.value.field == field
    assert field in str(caught.value)


def test_metadata_asks_for_the_training_of_every_parameter() -> None:
    assert requests.create_model(CREATE).lora is not None
    asked = requests.create_model({**CREATE, "user_metadata": {requests.TRAINING: "full"}})
    assert asked.lora is None


def test_the_sdks_defaults_are_the_events_defaults() -> None:
    sent = {
        "learning_rate": 1e-4,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-12,
        "weight_decay": 0.0,
        "grad_clip_norm": 0.0,
    }
    assert requests.optim_step({**OPTIM, "adam_params": sent}) == requests.optim_step(
        {**OPTIM, "adam_params": {}}
    )


def test_adamw_under_its_other_name_is_the_same_step() -> None:
    one = requests.optim_step({**OPTIM, "adam_params": {"learning_rate": 0.5}})
    assert requests.optim_step({**OPTIM, "optimizer_params": {"type": "adamw", "learning_rate": 0.5}}) == one


def test_metadata_becomes_text_in_key_order() -> None:
    created = requests.create_model(
        {**CREATE, "user_metadata": {"b": {"y": 1, "x": None}, "a": "plain", "c": 2}}
    )
    assert list(created.user_metadata.items()) == [("a", "plain"), ("b", '{"x": null, "y": 1}'), ("c", "2")]
