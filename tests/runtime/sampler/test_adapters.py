"""Adapters and whole models against PEFT and transformers, and what is held in memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from runtime.sampler.contract import SamplingRefused
from runtime.sampler.engine import TransformersEngine
from tests.runtime.sampler.conftest import PROMPT, finish, numbers, plain_sampled, request, tokens
from tests.support.folders import random_folder

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
NEAR = {"atol": 1e-5, "rtol": 1e-5}
"""Drawn tokens may be unlikely ones, whose logprobs have fewer digits behind the point."""


def adapter_folder(
    base: Path, folder: Path, *, rank: int = 4, seed: int = 0, modules: list[str] = LAYERS
) -> Path:
    """Made by PEFT, with a B that is not 0."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=32, target_modules=modules))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder, save_embedding_layers=False)
    return folder


def peft_model(base: Path, folder: Path) -> Any:
    return PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder
    ).eval()


@pytest.fixture(scope="module")
def adapters(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three, of unlike ranks."""
    root = tmp_path_factory.mktemp("adapters")
    return [adapter_folder(tiny_folder, root / str(i), rank=2 + 3 * i, seed=i) for i in range(3)]


def test_rows_of_several_adapters_in_one_batch_agree_with_peft(engine, tiny_folder, model, adapters) -> None:
    urls = [None, str(adapters[0]), f"file://{adapters[1]}"]
    found = finish(engine, *(request(max_tokens=12, temperature=0.8, url=url, num_samples=2) for url in urls))
    judges = [model, peft_model(tiny_folder, adapters[0]), peft_model(tiny_folder, adapters[1])]
    for sampled, judge in zip(found, judges, strict=True):
        for index in (0, 1):
            wanted = plain_sampled(judge, PROMPT, tokens(sampled, index), 0.8)
            torch.testing.assert_close(numbers(sampled.sequences[index].logprobs), wanted, **NEAR)


def test_an_adapter_moves_the_logprobs_of_the_prompt(engine, tiny_folder, model, adapters) -> None:
    (sampled,) = finish(engine, request(max_tokens=1, prompt_logprobs=True, url=str(adapters[2])))
    wanted = plain_sampled(peft_model(tiny_folder, adapters[2]), PROMPT[:1], list(PROMPT[1:]))
    torch.testing.assert_close(numbers(sampled.prompt_logprobs)[1:], wanted, **NEAR)
    assert (wanted - plain_sampled(model, PROMPT[:1], list(PROMPT[1:]))).abs().max() > 0.01


def test_what_was_read_once_is_what_is_served(engine, tiny_folder, adapters, tmp_path) -> None:
    folder = shutil.copytree(adapters[0], tmp_path / "weights")
    before = finish(engine, request(max_tokens=1, prompt_logprobs=True, url=str(folder)))
    shutil.rmtree(folder)
    assert finish(engine, request(max_tokens=1, prompt_logprobs=True, url=str(folder)))[
        0
    ].prompt_logprobs == (before[0].prompt_logprobs)


def test_the_sampler_used_longest_ago_makes_room(engine, adapters) -> None:
    """The engine holds two."""
    urls = [str(folder) for folder in adapters]
    for index in (0, 1, 0, 2):
        engine.weights(request(url=urls[index]))
    assert engine.library.held == (urls[0], urls[2])


def test_a_whole_model_is_served_as_it_is(engine, tmp_path) -> None:
    folder = random_folder(tmp_path / "whole", vocab_size=320)
    judge = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    whole, base = finish(engine, request(url=str(folder), temperature=0.9), request())
    torch.testing.assert_close(
        numbers(whole.sequences[0].logprobs), plain_sampled(judge, PROMPT, tokens(whole), 0.9), **NEAR
    )
    assert len(tokens(base)) == 8


@pytest.mark.parametrize("tied", [False, True])
def test_an_adapter_of_experts_agrees_with_its_products_in_the_weights(tmp_path, tied) -> None:
    """PEFT's older names, one layer an expert, as training writes them; the judge is the sum W + scale · B A."""
    from safetensors.torch import save_file

    base = random_folder(tmp_path / "moe", "qwen3_moe", tied=tied, vocab_size=320)
    judge = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    experts = judge.model.layers[1].mlp.experts
    halves = {"gate_proj": slice(None, experts.gate_up_proj.shape[1] // 2)}
    halves["up_proj"] = slice(halves["gate_proj"].stop, None)
    held = {}
    with torch.no_grad():
        for part, weight in [
            *((f"mlp.experts.2.{half}", experts.gate_up_proj[2][at]) for half, at in halves.items()),
            ("mlp.experts.0.down_proj", experts.down_proj[0]),
            ("self_attn.o_proj", judge.model.layers[1].self_attn.o_proj.weight),
        ]:
            a = 0.1 * torch.randn(2, weight.shape[1], generator=generator)
            b = 0.1 * torch.randn(weight.shape[0], 2, generator=generator)
            name = f"base_model.model.model.layers.1.{part}"
            held |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
            weight += 16 * (b @ a)
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(held, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 32}))
    engine = TransformersEngine(base, max_running=4, max_samplers=2)
    sampled, plain = finish(engine, request(url=str(folder)), request())
    torch.testing.assert_close(
        numbers(sampled.sequences[0].logprobs), plain_sampled(judge, PROMPT, tokens(sampled)), **NEAR
    )
    untouched = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    torch.testing.assert_close(
        numbers(plain.sequences[0].logprobs), plain_sampled(untouched, PROMPT, tokens(plain)), **NEAR
    )


def test_a_folder_that_is_gone_is_an_error_and_never_the_base_model(engine, tmp_path) -> None:
    with pytest.raises(SamplingRefused, match=r"weights at .*/nowhere are gone"):
        engine.weights(request(url=str(tmp_path / "nowhere")))


def test_an_adapter_of_something_else_is_refused_by_name(engine, adapters, tmp_path) -> None:
    folder = shutil.copytree(adapters[0], tmp_path / "dora")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(SamplingRefused, match="use_dora is True"):
        engine.weights(request(url=str(folder)))
    other = random_folder(tmp_path / "other", vocab_size=320)
    foreign = adapter_folder(other, tmp_path / "foreign", modules=["q_proj"])
    with pytest.raises(SamplingRefused, match=r"q_proj goes from \d+ to \d+ features"):
        engine.weights(request(url=str(foreign)))
