"""Hugging Face folders of every family go in and come out, and compute what transformers computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from actors import engine, weights
from actors.contract import EngineConfig
from actors.models.spec import UnsupportedModel
from tests.support import reference
from tests.support.folders import Family, random_folder
from tests.support.models import Model
from tests.support.requests import datums, packed

FOLDERS: dict[str, Callable[[Path], Path]] = {
    "qwen2-tied": lambda folder: random_folder(folder, "qwen2", tied=True),
    "qwen2-untied": lambda folder: random_folder(folder, "qwen2"),
    "qwen3-tied": lambda folder: random_folder(folder, "qwen3", tied=True),
    "qwen3-untied-sharded": lambda folder: random_folder(folder, "qwen3", max_shard_size="20KB"),
    "llama-tied-sharded": lambda folder: random_folder(folder, "llama", tied=True, max_shard_size="20KB"),
    "llama-untied": lambda folder: random_folder(folder, "llama"),
    "llama-without-grouped-queries": lambda folder: random_folder(folder, "llama", num_key_value_heads=4),
    "qwen3-one-group": lambda folder: random_folder(folder, "qwen3", num_key_value_heads=1),
}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def assert_computes_like_transformers(folder: Path, tokens_S: torch.Tensor, dump: Path) -> None:
    """Logits and logprobs within 1e-5, weights back bit for bit."""
    theirs = reference.load(folder)
    with torch.no_grad():
        wanted = theirs(input_ids=tokens_S[None], use_cache=False).logits[0]
    with engine.opened(EngineConfig(folder), 0, dist.HashStore()) as opened:
        with torch.no_grad():
            positions = torch.arange(len(tokens_S))[None]
            found = opened.base[0](tokens_S[None], positions, None)[0]
        model = Model(opened, dump)
        tokens, inputs = datums((7, 3, 12), seed=1)
        result = model.call(packed(tokens, inputs, forward_only=True))
        back = weights.hugging_face_tensors(opened.base[0], opened.spec)
    assert float((found - wanted).abs().max()) <= 1e-5
    assert wanted.std() > 0.1
    with torch.no_grad():
        logprobs = [
            torch.log_softmax(theirs(input_ids=t[None]).logits[0], -1).gather(
                1, datum.tensors["target_tokens"][:, None]
            )[:, 0]
            for t, datum in zip(tokens, inputs, strict=True)
        ]
    assert reference.worst(result.logprobs, logprobs) <= 1e-5
    held = tensors_of(folder)
    assert back.keys() == held.keys()
    for name, values in held.items():
        assert torch.equal(back[name], values), name


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_random_folder_computes_like_transformers_and_comes_back_bit_for_bit(
    tmp_path: Path, kind: str
) -> None:
    folder = FOLDERS[kind](tmp_path / "model")
    assert ((folder / "model.safetensors.index.json").is_file()) == kind.endswith("sharded")
    tokens = torch.randint(0, 320, (40,), generator=torch.Generator().manual_seed(2))
    assert_computes_like_transformers(folder, tokens, tmp_path)


def test_tiny_computes_like_transformers(tiny_folder: Path, tmp_path: Path) -> None:
    tokens = torch.randint(0, 320, (150,), generator=torch.Generator().manual_seed(3))
    assert_computes_like_transformers(tiny_folder, tokens, tmp_path)


def test_bfloat16_weights_are_read_as_the_same_numbers_in_float32(tmp_path: Path) -> None:
    folder = random_folder(tmp_path / "model", "llama")
    halved = {name: t.bfloat16() for name, t in tensors_of(folder).items()}
    save_file(halved, folder / "model.safetensors", metadata={"format": "pt"})
    with engine.opened(EngineConfig(folder), 0, dist.HashStore()) as opened:
        back = weights.hugging_face_tensors(opened.base[0], opened.spec)
    for name, values in halved.items():
        assert torch.equal(back[name], values.float()), name


def spoilt(folder: Path, family: Family, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    random_folder(folder, family)
    tensors = tensors_of(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def refusal(folder: Path) -> str:
    with (
        pytest.raises(UnsupportedModel) as caught,
        engine.opened(EngineConfig(folder), 0, dist.HashStore()),
    ):
        pass
    return str(caught.value)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3", "model.layers.1.mlp.up_proj.weight"),
        ("qwen3", "model.layers.0.self_attn.k_norm.weight"),
        ("qwen2", "model.layers.0.self_attn.v_proj.bias"),
        ("llama", "lm_head.weight"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, family: Family, name: str) -> None:
    folder = spoilt(tmp_path / "model", family, lambda tensors: tensors.pop(name))
    assert refusal(folder) == f"{folder} lacks the tensor {name!r}"


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.1.self_attn.k_proj.weight", (32, 32)),
        ("model.layers.0.self_attn.q_proj.weight", (64, 32)),
        ("model.layers.0.mlp.down_proj.weight", (32, 48)),
        ("model.embed_tokens.weight", (320, 32)),
        ("model.norm.weight", (32,)),
    ],
)
def test_a_tensor_of_another_shape_is_named_with_both_shapes(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name][1:].contiguous()

    folder = spoilt(tmp_path / "model", "qwen3", cut)
    found = (shape[0] - 1, *shape[1:])
    assert refusal(folder) == f"{folder}: {name} has shape {found}; by config.json it should be {shape}"


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    folder = random_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    assert "holds no weights" in refusal(folder)
