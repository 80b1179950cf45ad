"""What a `config.json` becomes, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.models.families import spec_of
from actors.models.spec import ModelSpec, UnsupportedModel

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
QWEN2 = QWEN3 | {"architectures": ["Qwen2ForCausalLM"]}
LLAMA = QWEN3 | {"architectures": ["LlamaForCausalLM"]}


def written(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_every_field_of_a_config_reaches_the_spec(tmp_path: Path) -> None:
    assert spec_of(written(tmp_path, QWEN3)) == ModelSpec(
        family="qwen3",
        vocab_size=100,
        hidden_size=32,
        ffn_hidden_size=48,
        num_layers=2,
        num_attention_heads=4,
        num_query_groups=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        context_length=512,
        tied_embeddings=True,
        qk_norm=True,
        qkv_bias=False,
    )


def test_families_differ_in_biases_and_norms(tmp_path: Path) -> None:
    qwen2, llama = spec_of(written(tmp_path, QWEN2)), spec_of(written(tmp_path, LLAMA))
    assert (qwen2.family, qwen2.qk_norm, qwen2.qkv_bias) == ("qwen2", False, True)
    assert (llama.family, llama.qk_norm, llama.qkv_bias) == ("llama", False, False)


def test_what_a_config_leaves_out_has_the_families_default(tmp_path: Path) -> None:
    left_out = ("head_dim", "num_key_value_heads", "rope_theta", "tie_word_embeddings")
    spec = spec_of(written(tmp_path, {k: v for k, v in LLAMA.items() if k not in left_out}))
    assert (spec.head_dim, spec.num_query_groups, spec.rope_theta) == (8, 4, 10_000.0)
    assert not spec.tied_embeddings


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
    ],
    ids=str,
)
def test_the_rotary_base_is_found_in_every_place_it_has_been_kept(
    tmp_path: Path, rope: dict[str, Any]
) -> None:
    config = {k: v for k, v in QWEN3.items() if k != "rope_theta"} | rope
    assert spec_of(written(tmp_path, config)).rope_theta == 5e5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            QWEN3 | {"architectures": ["MambaForCausalLM"]},
            "MambaForCausalLM.*supported are.*Qwen3ForCausalLM",
        ),
        ({"model_type": "qwen3"}, "no architecture"),
        (QWEN3 | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
        (LLAMA | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "rope_type 'llama3'"),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 64}, "sliding-window"),
        (QWEN3 | {"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        (QWEN3 | {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (QWEN3 | {"attention_dropout": 0.1}, r"attention_dropout 0\.1"),
        (QWEN3 | {"attention_bias": True}, "attention_bias"),
        (LLAMA | {"attention_bias": True}, "attention_bias"),
        (LLAMA | {"mlp_bias": True}, "mlp_bias"),
        (QWEN3 | {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (QWEN3 | {"vocab_size": None, "rms_norm_eps": None}, "does not set vocab_size, rms_norm_eps"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_honoured_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        spec_of(written(tmp_path, config))


def test_an_unused_sliding_window_is_no_reason_to_refuse(tmp_path: Path) -> None:
    config = QWEN2 | {"use_sliding_window": False, "sliding_window": 4096, "layer_types": None}
    assert spec_of(written(tmp_path, config)).family == "qwen2"


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"no config\.json"):
        spec_of(tmp_path)
