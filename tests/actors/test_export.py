"""What is saved for others: PEFT loads the adapter, transformers the whole model, and both compute what we compute."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.checkpoint_files import adapter_config
from actors.contract import AdapterConfig, FullConfig
from actors.engine import Engine
from bus.events import AdamParams
from tests.support import checkpoints, reference
from tests.support.models import Model
from tests.support.requests import datums, packed

pytestmark = pytest.mark.slow

LENGTHS = (7, 3, 11)
ADAPTERS = {
    "everything": AdapterConfig(rank=8, alpha=32, seed=1),
    "attention": AdapterConfig(rank=4, alpha=12, seed=2, train_mlp=False, train_unembed=False),
}


def scored(model: Model) -> list[Tensor]:
    result = model.call(packed(*datums(LENGTHS, seed=3), forward_only=True))
    return [torch.as_tensor(values) for values in result.logprobs]


@torch.no_grad()
def logprobs(model: torch.nn.Module) -> list[Tensor]:
    tokens, inputs = datums(LENGTHS, seed=3)
    return [
        torch.log_softmax(model(input_ids=t[None]).logits[0], -1)
        .gather(1, datum.tensors["target_tokens"][:, None])
        .squeeze(1)
        for t, datum in zip(tokens, inputs, strict=True)
    ]


@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
def test_peft_loads_the_adapter_and_computes_the_same(
    tiny_engine: Engine,
    tiny_model: Callable[..., Model],
    tiny_folder: Path,
    tmp_path: Path,
    adapter: AdapterConfig,
) -> None:
    model = tiny_model(adapter, b_seed=4)
    folder = checkpoints.save(
        checkpoints.on(tiny_engine), model.id, adapter, tmp_path / "saved", tiny_folder, optimizer=False
    )
    assert sorted(file.name for file in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", ".*adapter keys.*")  # some that it did not find
        theirs = peft.PeftModel.from_pretrained(reference.load(tiny_folder), folder)
    config = theirs.peft_config["default"]
    assert (config.r, config.lora_alpha) == (adapter.rank, adapter.alpha)
    assert config.base_model_name_or_path == checkpoints.BASE_MODEL
    assert reference.worst(scored(model), logprobs(theirs)) <= 1e-5
    with theirs.disable_adapter():
        assert reference.worst(scored(model), logprobs(theirs)) > 1e-3


def test_transformers_loads_the_whole_model_with_its_tokenizer(
    tiny_engine: Engine, tiny_model: Callable[..., Model], tiny_folder: Path, tmp_path: Path
) -> None:
    model = tiny_model(FullConfig())
    model.call(packed(*datums(LENGTHS, seed=1)))
    model.step(AdamParams(learning_rate=1e-3))
    folder = checkpoints.save(
        checkpoints.on(tiny_engine), model.id, FullConfig(), tmp_path / "saved", tiny_folder, optimizer=False
    )
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert theirs.dtype == torch.float32
    assert reference.worst(scored(model), logprobs(theirs)) <= 1e-5
    assert reference.worst(scored(model), logprobs(reference.load(tiny_folder))) > 1e-3
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("ab") == AutoTokenizer.from_pretrained(tiny_folder).encode("ab")


def test_the_description_names_what_was_trained() -> None:
    chosen = AdapterConfig(rank=16, alpha=8.0, seed=0, train_attn=False)
    described = json.loads(json.dumps(adapter_config(chosen, "org/base")))
    assert described["target_modules"] == ["gate_proj", "up_proj", "down_proj", "lm_head"]
    assert (described["r"], described["lora_alpha"]) == (16, 8.0)
