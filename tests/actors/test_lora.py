"""Adapters: neutral when fresh, and made of (seed, name, rank) and the flags alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from actors import loss_pass
from actors.contract import AdapterConfig
from actors.engine import Engine
from actors.lora import initial_a
from actors.packing import Schedule, slots
from tests.support.models import Model
from tests.support.reference import Reference
from tests.support.requests import random_request

NewModel = Callable[..., Model]
LENGTHS = (7, 3, 11)
FLAGS = {
    "train_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "train_mlp": ("gate_proj", "up_proj", "down_proj"),
    "train_unembed": ("lm_head",),
}


def base_logprobs(engine: Engine, name: str) -> list[bytes]:
    """What the base model computes with no adapter in its way. `name` is a model, dropped here."""
    engine.unload(name)
    request = random_request(LENGTHS, forward_only=True)
    (outputs,) = loss_pass.run(engine.base, [request], slots([request], [0], 0, Schedule()))
    return [values.tobytes() for values in outputs[0].logprobs]


@pytest.mark.parametrize("rank", [1, 3, 8, 32, 100])
def test_a_fresh_adapter_of_any_rank_changes_no_bit(
    small_model: NewModel, small_engine: Engine, rank: int
) -> None:
    model = small_model(AdapterConfig(rank=rank, alpha=32, seed=rank))
    found = model.call(random_request(LENGTHS, forward_only=True)).logprobs
    assert [values.tobytes() for values in found] == base_logprobs(small_engine, model.id)


def test_an_adapter_that_is_not_fresh_changes_the_logprobs(
    small_model: NewModel, small_engine: Engine
) -> None:
    model = small_model(AdapterConfig(rank=4, alpha=32, seed=0), b_seed=1)
    found = model.call(random_request(LENGTHS, forward_only=True)).logprobs
    assert [values.tobytes() for values in found] != base_logprobs(small_engine, model.id)


@pytest.mark.parametrize("flag", FLAGS)
def test_a_train_flag_that_is_off_leaves_out_its_layers(small_model: NewModel, flag: str) -> None:
    names = small_model(AdapterConfig(4, 32, 0, **{flag: False})).weights().keys()
    layers = {name.rsplit(".", 2)[0].rsplit(".", 1)[-1] for name in names}
    assert layers == {layer for other, group in FLAGS.items() if other != flag for layer in group}


@pytest.mark.parametrize("rank", [2, 5])
def test_names_and_shapes_are_pefts(small_model: NewModel, small_folder: Path, rank: int) -> None:
    ours = {name: t.shape for name, t in small_model(AdapterConfig(rank, 32, 0)).weights().items()}
    assert ours == {name: p.shape for name, p in Reference(small_folder, rank).parameters.items()}


def test_the_seed_alone_decides_a_and_b_is_zero(small_model: NewModel) -> None:
    first, again, other = (small_model(AdapterConfig(4, 32, seed)).weights() for seed in (7, 7, 8))
    for name, values in first.items():
        assert torch.equal(again[name], values)
        if "lora_A" in name:
            assert not torch.equal(other[name], values)
        else:
            assert (values == 0).all()


def test_flags_and_alpha_do_not_change_the_as_that_are_there(small_model: NewModel) -> None:
    everything = small_model(AdapterConfig(4, 32, 7)).weights()
    some = small_model(AdapterConfig(4, 16, 7, train_attn=False)).weights()
    assert some
    assert all(torch.equal(everything[name], values) for name, values in some.items())


def test_no_two_as_are_alike(small_model: NewModel) -> None:
    weights = small_model(AdapterConfig(4, 32, 0)).weights()
    rows = [bytes(t[0].numpy().tobytes())[:64] for name, t in weights.items() if "lora_A" in name]
    assert len(set(rows)) == len(rows)


def test_a_is_what_the_formula_says(small_model: NewModel) -> None:
    """U(−1/√in, 1/√in), from torch's generator seeded by the blake2b of "seed/name", below 2⁶³."""
    weights = small_model(AdapterConfig(rank=6, alpha=32, seed=12)).weights()
    for layer, inputs in (("model.layers.1.mlp.down_proj", 48), ("lm_head", 32)):
        name = f"{layer}.lora_A.weight"
        digest = hashlib.blake2b(f"12/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") % 2**63)
        uniform = torch.rand(6, inputs, generator=generator)  # [0, 1)
        bound = 1 / math.sqrt(inputs)
        torch.testing.assert_close(weights[name], bound * (2 * uniform - 1), rtol=0, atol=1e-7)


def test_a_is_spread_like_pefts(small_folder: Path) -> None:
    """PEFT draws Kaiming-uniform with a = √5; the same bound and, over many numbers, the same deviation."""
    torch.manual_seed(0)
    theirs = Reference(small_folder, rank=256).parameters["model.layers.0.self_attn.q_proj.lora_A.weight"]
    ours = initial_a("any", 3, 256, 32)
    bound = 1 / math.sqrt(32)
    for drawn in (ours, theirs.detach()):
        assert drawn.shape == (256, 32)
        assert drawn.abs().max() <= bound
        assert drawn.abs().max() > 0.999 * bound
        assert drawn.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
        assert abs(drawn.mean().item()) < 0.02 * bound


@pytest.mark.parametrize(("rank", "alpha"), [(4, 32.0), (8, 32.0), (4, 4.0)])
def test_the_output_is_scaled_by_alpha_over_rank(
    small_model: NewModel, small_folder: Path, rank: int, alpha: float
) -> None:
    peft = Reference(small_folder, rank, alpha)
    model = small_model(AdapterConfig(rank, alpha, 1), b_seed=1)
    peft.set_weights(model.weights())
    request = random_request((6,), forward_only=True)
    with torch.no_grad():
        wanted = peft.logprobs(
            torch.from_numpy(request.tokens), torch.from_numpy(request.inputs["target_tokens"])
        )
    found = torch.from_numpy(model.call(request).logprobs[0])
    assert (found - wanted).abs().max() <= 1e-5
