"""Several ranks answer as one; what they must agree on, they agree on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from actors.contract import AdapterConfig, EngineConfig, PassFailed, WindowIncomplete
from actors.group import GroupConfig, GroupDied, MegatronGroup, RequestOutput
from actors.layout import Layout
from actors.packing import PackingConfig
from bus.events import AdamParams
from tests.support import dumps
from tests.support.requests import datums, packed, random_request

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

ONE_BY_ONE = PackingConfig(max_datums_per_microbatch=1)
ADAM = AdamParams(learning_rate=1e-2)
ADAPTER = AdapterConfig(rank=4, alpha=32, seed=1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two_ranks(ray_cluster: None, small_folder: Path, dump_folder: Path) -> AsyncIterator[MegatronGroup]:
    """DP = 2 with the distributed optimizer. One group for all: most of the time is the ranks\' imports."""
    layout = Layout(dp=2, distributed_optimizer=True)
    group = await MegatronGroup.start(
        GroupConfig(EngineConfig(small_folder, layout, dump_gradients=dump_folder))
    )
    try:
        yield group
    finally:
        group.close()


def of_ranks(folder: Path, model_id: str, step: int, kind: str) -> list[torch.Tensor]:
    return [dumps.vector(dumps.of_rank(folder, model_id, step, rank)[kind]) for rank in range(2)]


@pytest.mark.parametrize("forward_only", [False, True], ids=["forward_backward", "forward"])
async def test_requests_of_fewer_datums_than_ranks_or_an_odd_number_finish(
    two_ranks: MegatronGroup, forward_only: bool
) -> None:
    name = f"odd-{forward_only}"
    await two_ranks.create(name, ADAPTER)
    tokens, inputs = datums((7, 3, 5), seed=1)
    alone = [
        await two_ranks.forward_backward(name, packed([t], [d], forward_only=forward_only))
        for t, d in zip(tokens, inputs, strict=True)
    ]
    together: RequestOutput = await two_ranks.forward_backward(
        name, packed(tokens, inputs, packing=ONE_BY_ONE, forward_only=forward_only)
    )
    assert [values.shape for values in together.logprobs] == [(7,), (3,), (5,)]
    for found, wanted in zip(together.logprobs, alone, strict=True):
        assert found.tobytes() == wanted.logprobs[0].tobytes()
    assert together.metrics["tokens:sum"] == 15
    losses = [output.metrics["loss:sum"] for output in alone]
    assert together.metrics["loss:sum"] == pytest.approx(sum(losses), rel=1e-12)


async def test_windows_of_two_one_and_three_microbatches_leave_equal_weights_on_every_rank(
    two_ranks: MegatronGroup, dump_folder: Path
) -> None:
    await two_ranks.create("replicas", ADAPTER)
    for step, lengths in enumerate(((7, 3), (5,), (4, 4, 9))):
        call = two_ranks.forward_backward("replicas", random_request(lengths, packing=ONE_BY_ONE))
        report = await two_ranks.optim_step("replicas", ADAM)
        await call
        assert (report.window_calls, report.window_tokens) == (1, sum(lengths))
        gradients = of_ranks(dump_folder, "replicas", step, "gradient")
        assert torch.equal(*gradients)
        assert report.grad_norm == pytest.approx(float(gradients[0].norm()), rel=1e-12)
        assert torch.equal(*of_ranks(dump_folder, "replicas", step, "after"))
    assert not torch.equal(
        of_ranks(dump_folder, "replicas", 2, "after")[0], of_ranks(dump_folder, "replicas", 1, "after")[0]
    )


async def test_a_pass_that_fails_on_one_rank_fails_on_all_and_is_undone_on_all(
    two_ranks: MegatronGroup, dump_folder: Path
) -> None:
    tokens, inputs = datums((5, 6, 4), seed=7)
    tokens[1] = torch.full((6,), 10_000)  # microbatch 1 of the window's 3, 4, 5: of rank 0 alone
    poisoned = packed(tokens, inputs, packing=ONE_BY_ONE)
    whole = random_request((3, 3, 3), seed=1, packing=ONE_BY_ONE)
    for name in ("undisturbed", "disturbed"):
        await two_ranks.create(name, ADAPTER)
        await two_ranks.forward_backward(name, whole)
        if name == "disturbed":
            with pytest.raises(PassFailed, match=r"index out of range|another rank"):
                await two_ranks.forward_backward(name, poisoned, label=9)
        await two_ranks.forward_backward(name, random_request((2, 8), seed=2, packing=ONE_BY_ONE))
        report = await two_ranks.optim_step(name, ADAM, accept_lost=frozenset({9}))
        assert report.window_calls == 2
    for kind in ("gradient", "after"):
        wanted, found = (of_ranks(dump_folder, name, 0, kind) for name in ("undisturbed", "disturbed"))
        assert all(map(torch.equal, found, wanted))


async def test_a_step_queued_behind_a_call_that_fails_fails_too_and_names_it(
    two_ranks: MegatronGroup,
) -> None:
    await two_ranks.create("behind", ADAPTER)
    _, inputs = datums((4,), seed=7)
    poisoned = packed([torch.full((4,), 10_000)], inputs)
    call = two_ranks.forward_backward("behind", poisoned, label=5)
    step = two_ranks.optim_step("behind", ADAM)
    outcomes = await asyncio.gather(call, step, return_exceptions=True)
    assert isinstance(outcomes[0], PassFailed)
    assert isinstance(outcomes[1], WindowIncomplete)
    assert outcomes[1].label == 5
    assert (await two_ranks.optim_step("behind", ADAM)).grad_norm == 0.0


async def test_a_gradient_that_is_not_finite_on_one_rank_vetoes_the_step_on_all(
    two_ranks: MegatronGroup, dump_folder: Path
) -> None:
    await two_ranks.create("veto", ADAPTER)
    await two_ranks.forward_backward("veto", random_request((5, 5), seed=1, packing=ONE_BY_ONE))
    assert not (await two_ranks.optim_step("veto", ADAM)).skipped

    await two_ranks.forward_backward("veto", random_request((5,), seed=1))  # rank 0, in order
    overflowing = packed(*datums((60,), seed=3, weight=3e37))
    await two_ranks.forward_backward("veto", overflowing)  # rank 1
    await two_ranks.forward_backward("veto", random_request((5,), seed=1))
    await two_ranks.forward_backward("veto", overflowing)
    report = await two_ranks.optim_step("veto", ADAM)
    assert report.skipped
    before, after = (of_ranks(dump_folder, "veto", 1, kind) for kind in ("before", "after"))
    assert all(map(torch.equal, after, before))

    await two_ranks.forward_backward("veto", random_request((5, 5), seed=2, packing=ONE_BY_ONE))
    report = await two_ranks.optim_step("veto", ADAM)
    assert (report.skipped, report.step) == (False, 3)
    after = of_ranks(dump_folder, "veto", 2, "after")
    assert torch.equal(*after)
    assert torch.isfinite(after[0]).all()


async def test_models_that_take_turns_have_the_bits_they_have_alone(
    two_ranks: MegatronGroup, dump_folder: Path
) -> None:
    calls = {
        "a": [random_request((7, 3, 4), seed=1, packing=ONE_BY_ONE), random_request((5,), seed=2)],
        "b": [random_request((6,), loss="ppo", seed=3), random_request((8, 2), loss="dro", seed=4)],
    }
    adapters = {"a": ADAPTER, "b": AdapterConfig(rank=3, alpha=32, seed=2, train_attn=False)}
    for name, adapter in adapters.items():
        await two_ranks.create(f"{name}-alone", adapter)
        await two_ranks.create(f"{name}-taking-turns", adapter)
        for request in calls[name]:
            await two_ranks.forward_backward(f"{name}-alone", request)
        await two_ranks.optim_step(f"{name}-alone", ADAM)

    pending = [
        two_ranks.forward_backward("a-taking-turns", calls["a"][0]),
        two_ranks.forward_backward("b-taking-turns", calls["b"][0]),
        two_ranks.forward_backward("a-taking-turns", calls["a"][1]),
        two_ranks.optim_step("a-taking-turns", ADAM),
        two_ranks.forward_backward("b-taking-turns", calls["b"][1]),
        two_ranks.optim_step("b-taking-turns", ADAM),
    ]
    await asyncio.gather(*pending)
    for name in adapters:
        for kind in ("gradient", "after"):
            wanted = of_ranks(dump_folder, f"{name}-alone", 0, kind)
            found = of_ranks(dump_folder, f"{name}-taking-turns", 0, kind)
            assert all(map(torch.equal, found, wanted)), (name, kind)


async def test_what_no_rank_expected_counts_as_the_death_of_the_group(two_ranks: MegatronGroup) -> None:
    await two_ranks.create("twice", ADAPTER)
    with pytest.raises(GroupDied, match=r"create of the ranks failed.*'twice' is in memory already"):
        await two_ranks.create("twice", ADAPTER)
