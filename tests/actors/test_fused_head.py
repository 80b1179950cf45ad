"""The LM head and its logprobs in one, against torch's log_softmax and gather on logits that exist whole."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from actors.head import fused_target_logprobs, target_logprobs

pytestmark = pytest.mark.usefixtures("one_rank")

SCALE = 1.7


@dataclass
class Head:
    """Hidden states, LM head and adapter; every tensor a leaf."""

    hidden_S_B_H: Tensor
    weight_V_H: Tensor
    u_T_R: Tensor
    B_V_R: Tensor
    targets: Tensor
    upstream: Tensor

    @classmethod
    def random(
        cls,
        S: int = 7,
        B: int = 2,
        V: int = 30,
        K: int | None = None,
        *,
        H: int = 6,
        R: int = 3,
        seed: int = 0,
    ) -> Head:
        generator = torch.Generator().manual_seed(seed)
        shape = (B, S) if K is None else (B, S, K)
        return cls(
            torch.randn(S, B, H, generator=generator),
            torch.randn(V, H, generator=generator),
            torch.randn(S * B, R, generator=generator),
            torch.randn(V, R, generator=generator),
            torch.randint(0, V, shape, generator=generator),
            torch.randn(shape, generator=generator),
        )

    def leaves(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in ("hidden_S_B_H", "weight_V_H", "u_T_R", "B_V_R")}

    def copy(self, dtype: torch.dtype | None = None, requires_grad: bool = True) -> Head:
        copies = {
            n: t.detach().to(dtype or t.dtype, copy=True).requires_grad_(requires_grad)
            for n, t in self.leaves().items()
        }
        return Head(**copies, targets=self.targets, upstream=self.upstream)

    def fused(self, *, adapted: bool = True, **options: Any) -> Tensor:
        adapter = (self.u_T_R, self.B_V_R, SCALE) if adapted else None
        return fused_target_logprobs(
            self.hidden_S_B_H, self.weight_V_H, self.targets, adapter=adapter, **options
        )

    def reference(self, *, adapted: bool = True, vocab_size: int | None = None) -> Tensor:
        """Logprobs like the targets, by torch alone."""
        logits = self.hidden_S_B_H.flatten(0, 1) @ self.weight_V_H.t()
        if adapted:
            logits = logits + SCALE * self.u_T_R @ self.B_V_R.t()
        S, B, _ = self.hidden_S_B_H.shape
        logits_B_S_V = logits[:, :vocab_size].view(S, B, -1).transpose(0, 1)
        wide = self.targets if self.targets.dim() == 3 else self.targets[..., None]
        return torch.log_softmax(logits_B_S_V, dim=-1).gather(-1, wide).reshape(self.targets.shape)

    def backward(self, logprobs: Tensor) -> None:
        logprobs.backward(self.upstream.to(logprobs.dtype))


def assert_same_gradients(ours: Head, theirs: Head, tolerance: float = 1e-5) -> None:
    """Each leaf's, an absent one counting as 0; relative to its largest element."""
    for name, leaf in ours.leaves().items():
        other = theirs.leaves()[name]
        wanted = torch.zeros_like(other) if other.grad is None else other.grad
        found = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        distance = (found.to(wanted.dtype) - wanted).abs().max()
        assert distance <= tolerance * max(1.0, wanted.abs().max()), name


@settings(deadline=None, max_examples=100)
@given(
    S=st.integers(1, 9),
    B=st.integers(1, 3),
    V=st.integers(1, 40),
    K=st.sampled_from([None, 1, 2, 5]),
    chunk_tokens=st.one_of(st.none(), st.integers(1, 30)),
    adapted=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_values_and_gradients_equal_those_of_log_softmax_at_any_chunk_size(
    S: int, B: int, V: int, K: int | None, chunk_tokens: int | None, adapted: bool, seed: int
) -> None:
    ours = Head.random(S, B, V, K, seed=seed).copy()
    theirs = ours.copy()
    found = ours.fused(adapted=adapted, chunk_tokens=chunk_tokens)
    ours.backward(found)
    wanted = theirs.reference(adapted=adapted)
    theirs.backward(wanted)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 14, None])
def test_the_forward_pass_gives_the_same_bits_with_and_without_gradients(chunk_tokens: int | None) -> None:
    head = Head.random().copy()
    recorded = head.fused(chunk_tokens=chunk_tokens)
    assert recorded.requires_grad
    with torch.no_grad():
        assert torch.equal(head.fused(chunk_tokens=chunk_tokens), recorded)
    assert torch.equal(head.copy(requires_grad=False).fused(chunk_tokens=chunk_tokens), recorded)


def test_in_one_chunk_it_gives_the_bits_of_the_plain_path() -> None:
    head = Head.random()
    plain = target_logprobs(head.hidden_S_B_H @ head.weight_V_H.t(), head.targets)
    assert torch.equal(head.fused(adapted=False), plain)


@pytest.mark.parametrize("garbage", [0.0, math.nan, math.inf], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 17, 29])
def test_rows_that_pad_the_vocabulary_take_no_part(vocab_size: int, garbage: float) -> None:
    head = Head.random(V=30)
    head.targets = head.targets % vocab_size
    theirs = head.copy()
    head.weight_V_H[vocab_size:] = garbage
    head.B_V_R[vocab_size:] = garbage
    ours = head.copy()
    found = ours.fused(vocab_size=vocab_size, chunk_tokens=4)
    ours.backward(found)
    wanted = theirs.reference(vocab_size=vocab_size)
    theirs.backward(wanted)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert_same_gradients(ours, theirs)
    assert (ours.weight_V_H.grad[vocab_size:] == 0).all()
    assert (ours.B_V_R.grad[vocab_size:] == 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_position_without_weight_poisons_no_gradient_whatever_it_holds(bad: float) -> None:
    head = Head.random(S=6, B=1)
    head.upstream[0, 2] = 0.0
    theirs = head.copy()
    head.hidden_S_B_H[2] = bad
    head.u_T_R[2] = bad
    ours = head.copy()
    found = ours.fused(chunk_tokens=4)
    assert not torch.isfinite(found[0, 2])
    ours.backward(found)
    theirs.backward(theirs.reference())
    assert_same_gradients(ours, theirs)
    assert (ours.hidden_S_B_H.grad[2] == 0).all()
    assert (ours.u_T_R.grad[2] == 0).all()


def test_where_no_position_has_weight_every_gradient_is_zero_even_if_the_head_is_not_finite() -> None:
    head = Head.random()
    head.weight_V_H[3] = math.inf
    head.upstream.zero_()
    ours = head.copy()
    ours.backward(ours.fused())
    for name, leaf in ours.leaves().items():
        assert (leaf.grad == 0).all(), name


def test_one_of_k_targets_without_weight_still_takes_part_in_nothing() -> None:
    head = Head.random(K=3)
    head.upstream[:, :, 1] = 0.0
    ours, theirs = head.copy(), head.copy()
    ours.backward(ours.fused(chunk_tokens=3))
    theirs.backward(theirs.reference())
    assert_same_gradients(ours, theirs)


def test_logits_far_from_zero_neither_overflow_nor_lose_digits() -> None:
    weight = torch.tensor([[3e4], [3e4 - 1], [-3e4]])
    found = fused_target_logprobs(torch.ones(1, 1, 1), weight, torch.tensor([[[0, 1, 2]]]))[0, 0]
    total = math.log1p(math.exp(-1))
    assert found.tolist() == pytest.approx([-total, -1 - total, -6e4 - total], rel=1e-6)


def test_bf16_weights_sum_in_float32() -> None:
    """A sum of 4096 equal terms stops growing at 256 in bf16; over tokens, so does a weight's gradient."""
    V = T = 4096
    hidden = torch.zeros(T, 1, 8, dtype=torch.bfloat16)
    hidden[..., 0] = 1.0
    weight = torch.zeros(V, 8, dtype=torch.bfloat16).requires_grad_()
    found = fused_target_logprobs(hidden, weight, torch.full((1, T), 5), chunk_tokens=1)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.full((1, T), -math.log(V)))
    found.sum().backward()
    assert weight.grad.dtype == torch.bfloat16
    assert weight.grad[5, 0].item() == pytest.approx(T - 1, rel=2**-8)
    assert weight.grad[6, 0].item() == pytest.approx(-1, rel=2**-8)


def test_bf16_values_and_gradients_are_those_of_float32_within_its_rounding() -> None:
    head = Head.random(V=50, H=16)
    ours = head.copy(torch.bfloat16)
    theirs = ours.copy(torch.float32)
    found = ours.fused(chunk_tokens=4)
    ours.backward(found)
    wanted = theirs.reference()
    theirs.backward(wanted)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2**-4)  # logits up to 16 have steps of 2⁻⁴
    assert_same_gradients(ours, theirs, tolerance=0.03)


class _Allocations(TorchDispatchMode):
    """Shapes of all tensors that an operation returns in memory that no argument of it owns."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        self.shapes += [
            tuple(x.shape)
            for x in tree_leaves(out)
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in known
        ]
        return out


@pytest.mark.parametrize("frozen", [True, False])
def test_neither_pass_holds_more_logits_than_a_chunk_nor_the_gradient_of_a_frozen_head(frozen: bool) -> None:
    head = Head.random(S=40, B=1, V=100).copy()
    head.weight_V_H.requires_grad_(not frozen)
    with _Allocations() as allocated:
        head.backward(head.fused(chunk_tokens=8))
    logits = [shape for shape in allocated.shapes if len(shape) == 2 and shape[1] == 100]
    assert max(logits) == (8, 100)
    assert ((100, 6) in allocated.shapes) == (not frozen)
    assert (head.weight_V_H.grad is None) == frozen


@pytest.mark.parametrize("chunk_tokens", [0, -3])
def test_a_chunk_of_no_tokens_is_refused(chunk_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"chunk_tokens is {chunk_tokens}; it must be at least 1"):
        Head.random().fused(chunk_tokens=chunk_tokens)


# Two tensor-parallel ranks over gloo, each in a process of its own.

ROWS = 10
"""Of the padded head, over both ranks."""
CASES = {
    "unpadded": 10,
    "padded": 7,
    "second-rank-all-padding": 5,
    "second-rank-all-padding-and-first-padded": 3,
}


def two_rank_head(vocab_size: int, K: int | None) -> Head:
    """The same on every rank; `u` is not a leaf there but A(hidden), A being its first rows."""
    head = Head.random(V=ROWS, K=K, H=6, R=3, seed=vocab_size)
    head.targets = head.targets % vocab_size
    return head


def _rank(rank: int, folder: str) -> None:
    """One rank's values and gradients of every case, as {case: {name: tensor}} in a file."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(f"{folder}/store", 2))
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, create_gloo_process_groups=False)
    results = {}
    for case, vocab_size in CASES.items():
        for K in (None, 3):
            head = two_rank_head(vocab_size, K)
            head.weight_V_H[vocab_size:] = math.nan
            head.B_V_R[vocab_size:] = math.nan
            mine = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
            hidden = head.hidden_S_B_H.requires_grad_()
            A = head.u_T_R[:3, :].new_tensor(range(18)).view(3, 6).div(10).requires_grad_()
            weight = head.weight_V_H[mine].clone().requires_grad_()
            B = head.B_V_R[mine].clone().requires_grad_()
            share = copy_to_tensor_model_parallel_region(hidden)
            share.retain_grad()
            u = copy_to_tensor_model_parallel_region(hidden.flatten(0, 1) @ A.t())
            logprobs = fused_target_logprobs(
                share, weight, head.targets, adapter=(u, B, SCALE), vocab_size=vocab_size, chunk_tokens=4
            )
            logprobs.backward(head.upstream)
            logits = (hidden.detach() @ weight.detach().t()).requires_grad_()
            plain = target_logprobs(logits, head.targets, vocab_size)
            plain.backward(head.upstream)
            results[case, K] = {
                "logprobs": logprobs.detach(),
                "hidden": hidden.grad,
                "share": share.grad,
                "A": A.grad,
                "weight": weight.grad,
                "B": B.grad,
                "plain": plain.detach(),
                "logits": logits.grad,
            }
    torch.save(results, f"{folder}/{rank}.pt")
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, dict[str, Tensor]]]:
    folder = tmp_path_factory.mktemp("two-ranks")
    torch.multiprocessing.spawn(_rank, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("K", [None, 3])
@pytest.mark.parametrize("case", CASES)
def test_two_tensor_parallel_ranks_give_what_one_whole_head_gives(
    two_ranks: list[dict[Any, dict[str, Tensor]]], case: str, K: int | None
) -> None:
    first, second = (rank[case, K] for rank in two_ranks)
    vocab_size = CASES[case]
    head = two_rank_head(vocab_size, K).copy(torch.float64)
    A = torch.arange(18, dtype=torch.float64).view(3, 6).div(10).requires_grad_()
    head.u_T_R = head.hidden_S_B_H.flatten(0, 1) @ A.t()
    wanted = head.reference(vocab_size=vocab_size)
    head.backward(wanted)

    def close(found: Tensor, wanted: Tensor) -> None:
        torch.testing.assert_close(found.double(), wanted.detach(), rtol=1e-5, atol=1e-5)

    assert torch.equal(first["logprobs"], second["logprobs"])
    close(first["logprobs"], wanted)
    for rank in (first, second):
        close(rank["A"], A.grad)
        close(rank["hidden"], head.hidden_S_B_H.grad)
    close(torch.cat([first["weight"], second["weight"]]), head.weight_V_H.grad)
    close(torch.cat([first["B"], second["B"]]), head.B_V_R.grad)
    for name in ("weight", "B"):
        assert (torch.cat([first[name], second[name]])[vocab_size:] == 0).all()


@pytest.mark.parametrize("case", CASES)
def test_a_rank_gives_its_own_share_of_the_hidden_states_gradient_for_the_caller_to_sum(
    two_ranks: list[dict[Any, dict[str, Tensor]]], case: str
) -> None:
    first, second = (rank[case, None] for rank in two_ranks)
    head = two_rank_head(CASES[case], None).copy(torch.float64)
    head.u_T_R = (
        (head.hidden_S_B_H.flatten(0, 1) @ torch.arange(18, dtype=torch.float64).view(3, 6).div(10).t())
        .detach()
        .requires_grad_()
    )
    head.backward(head.reference(vocab_size=CASES[case]))
    summed = first["share"].double() + second["share"]
    torch.testing.assert_close(summed, head.hidden_S_B_H.grad, rtol=1e-5, atol=1e-5)
    assert (second["share"] == 0).all() == case.startswith("second-rank-all-padding")


@pytest.mark.parametrize("K", [None, 3])
@pytest.mark.parametrize("case", CASES)
def test_the_plain_path_on_two_ranks_leaves_padded_columns_out_too(
    two_ranks: list[dict[Any, dict[str, Tensor]]], case: str, K: int | None
) -> None:
    first, second = (rank[case, K] for rank in two_ranks)
    vocab_size = CASES[case]
    head = two_rank_head(vocab_size, K)
    logits = (head.hidden_S_B_H @ head.weight_V_H[:vocab_size].t()).double().requires_grad_()
    wide = head.targets if K is not None else head.targets[..., None]
    wanted = torch.log_softmax(logits.transpose(0, 1), dim=-1).gather(-1, wide).reshape(head.targets.shape)
    wanted.backward(head.upstream.double())
    assert torch.equal(first["plain"], second["plain"])
    torch.testing.assert_close(first["plain"].double(), wanted.detach(), rtol=1e-5, atol=1e-5)
    found = torch.cat([first["logits"], second["logits"]], dim=-1)
    torch.testing.assert_close(found[..., :vocab_size].double(), logits.grad, rtol=1e-5, atol=1e-5)
    assert (found[..., vocab_size:] == 0).all()


# The high-water mark is VmHWM and not getrusage's ru_maxrss, which a process inherits from the one that started it.
MEMORY_OF_ONE_PATH = """
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from actors import device
from actors.head import fused_target_logprobs, target_logprobs
from actors.layout import Layout
from actors.parallel import join


def kilobytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


torch.set_num_threads(1)
with device.use(), join(Layout(), 0, dist.HashStore()):
    hidden = torch.randn(8192, 1, 64).requires_grad_()
    weight = torch.randn(49152, 64)
    targets = torch.randint(0, 49152, (1, 8192))
    before = kilobytes("VmRSS")
    if sys.argv[1] == "fused":
        logprobs = fused_target_logprobs(hidden, weight, targets)
    else:
        logprobs = target_logprobs(hidden @ weight.t(), targets)
    logprobs.sum().backward()
    print(kilobytes("VmHWM") - before)
"""


def kilobytes_of(path: str) -> int:
    """Memory that the forward and backward pass of 8192 tokens at a vocabulary of 49152 add, at their peak."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_OF_ONE_PATH, path],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return int(done.stdout.split()[-1])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc to read peak memory")
def test_8192_tokens_at_a_vocabulary_of_49152_take_a_fifth_of_the_plain_paths_memory_or_less() -> None:
    plain, fused = kilobytes_of("plain"), kilobytes_of("fused")
    assert plain >= 5 * fused, (plain, fused)
