"""What a checkpoint says of itself, and into what it may be loaded."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from actors.contract import AdapterConfig, FullConfig, TenantConfig
from actors.models import tiny
from bus.errors import NewerFormat
from runtime.checkpoints import manifest
from runtime.checkpoints.manifest import BaseModel, Manifest, misfit, shape

ADAPTER = AdapterConfig(rank=8, alpha=32.0, seed=3)
TINY = BaseModel(name="tiny", files="f00", shape=shape(tiny.spec()))


def made(**changes: object) -> Manifest:
    fields: dict[str, object] = {
        "model_id": "run",
        "seq_id": 3,
        "kind": "weights",
        "name": "x",
        "base": TINY,
        "adapter": ADAPTER,
        "optimizer": True,
    }
    return Manifest(**{**fields, **changes})  # type: ignore[arg-type]


def test_it_is_read_as_it_was_written() -> None:
    for adapter in (ADAPTER, None):
        written = made(adapter=adapter, sizes={"model.safetensors": 12})
        assert manifest.decode(msgspec.json.encode(written)) == written
        assert written.config == (adapter or FullConfig())


def test_a_newer_format_is_refused_by_name() -> None:
    newer = msgspec.json.encode(made(format=manifest.FORMAT + 1))
    with pytest.raises(NewerFormat, match=str(manifest.FORMAT + 1)):
        manifest.decode(newer)


def test_a_base_model_is_the_same_under_its_name_or_with_its_files_but_never_with_another_shape() -> None:
    assert TINY.same(msgspec.structs.replace(TINY, files="copied"))
    assert TINY.same(msgspec.structs.replace(TINY, name="renamed"))
    assert not TINY.same(msgspec.structs.replace(TINY, name="renamed", files="others"))
    wider = shape(dataclasses.replace(tiny.spec(), hidden_size=512))
    assert not TINY.same(msgspec.structs.replace(TINY, shape=wider))
    longer = shape(dataclasses.replace(tiny.spec(), context_length=4096))
    assert TINY.same(msgspec.structs.replace(TINY, shape=longer))


@pytest.mark.parametrize(
    ("model", "because"),
    [
        (dataclasses.replace(ADAPTER, seed=9), None),
        (dataclasses.replace(ADAPTER, rank=4), "lora rank 8, and the model has 4"),
        (dataclasses.replace(ADAPTER, alpha=16.0), r"lora alpha 32\.0, and the model has 16\.0"),
        (dataclasses.replace(ADAPTER, train_mlp=False), "lora train_mlp True, and the model has False"),
        (FullConfig(), "a LoRA adapter, and the model trains every parameter"),
    ],
)
def test_a_model_takes_over_weights_of_its_own_configuration(
    model: TenantConfig, because: str | None
) -> None:
    found = misfit(ADAPTER, model)
    if because is None:
        assert found is None
    else:
        import re

        assert found is not None
        assert re.search(because, found)


def test_a_whole_model_is_no_adapter() -> None:
    assert misfit(FullConfig(), FullConfig()) is None
    assert "every parameter, and the model trains a LoRA adapter" in str(misfit(FullConfig(), ADAPTER))
