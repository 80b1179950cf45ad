"""What the base model's folder and the settings say of each other, before anything is started."""

from __future__ import annotations

from typing import Any

import pytest

from actors.layout import Layout
from actors.transforms.fake_int4 import FakeInt4
from runtime import base_model
from runtime.config import load


def settings(**overrides: Any) -> Any:
    dotted = {name.replace("__", "."): value for name, value in overrides.items()}
    return load(environment={}, overrides=dotted)


def test_the_layout_has_every_size_of_the_settings() -> None:
    chosen = base_model.layout(
        settings(layout__tp=2, layout__pp=2, layout__virtual_pp=2, layout__sequence_parallel=True)
    )
    assert chosen == Layout(tp=2, pp=2, virtual_pp=2, sequence_parallel=True)


def test_a_weight_transform_is_off_unless_asked_for() -> None:
    assert base_model.fake_int4(settings()) is None
    chosen = base_model.fake_int4(settings(fake_int4__convention="kimi", fake_int4__modules=["*"]))
    assert chosen == FakeInt4("kimi", ("*",))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"layout__tp": 8}, "layout.tp is 8, which does not divide the model's 4 attention heads"),
        ({"fake_int4__convention": "rtn"}, "which names no linear layer of this model"),
        (
            {"dtype": "bfloat16", "fake_int4__convention": "rtn", "fake_int4__modules": ["*.down_proj"]},
            "fake_int4 needs dtype float32 in this release; dtype is bfloat16",
        ),
        (
            {
                "fake_int4__convention": "rtn",
                "fake_int4__modules": ["*.down_proj"],
                "fake_int4__group_size": 256,
            }
            | {"layout__tp": 2},
            "cannot quantize model.layers.0.mlp.down_proj at tp=2",
        ),
        ({"model": "nowhere"}, "is not a Hugging Face model folder"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(overrides: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        base_model.check(settings(**overrides))
    assert "\n" not in str(caught.value)


def test_what_works_is_not_refused() -> None:
    base_model.check(settings(layout__tp=2, fake_int4__convention="kimi", fake_int4__modules=["*.down_proj"]))
