"""Which fields of two results differ, and by how much."""

from __future__ import annotations

import struct

from bus.datum import tensor
from bus.events import Failed, ForwardBackwardDone, OptimStepDone, Tensor
from runtime.verdicts import Checked, Difference, Tally, differences, in_words


def done(logprobs: list[float], **metrics: float) -> ForwardBackwardDone:
    return ForwardBackwardDone(
        loss_fn_outputs=({"logprobs": tensor(logprobs, "float32", "logprobs")},), metrics=metrics
    )


def test_the_same_bits_differ_in_nothing_also_where_they_are_no_numbers() -> None:
    nan = float("nan")
    assert differences(done([-1.0, nan], loss=nan), done([-1.0, nan], loss=nan)) == ()


def test_a_last_bit_of_a_logprob_is_found_and_measured() -> None:
    (raised,) = struct.unpack("<f", struct.pack("<I", struct.unpack("<I", struct.pack("<f", 2.0))[0] + 1))
    (found,) = differences(done([1.0, 2.0, 4.0]), done([1.0, raised, 4.0]))
    assert (found.field, found.values, found.by) == ("loss_fn_outputs[0].logprobs", 1, 2.0**-22)


def test_the_largest_of_several_differences_is_told() -> None:
    (found,) = differences(done([1.0, 2.0, 4.0]), done([1.5, 2.0, 2.0]))
    assert (found.by, found.values, found.published, found.replayed) == (2.0, 2, "4.0", "2.0")
    assert in_words(found) == "loss_fn_outputs[0].logprobs by 2 in 2 values (4.0 → 2.0)"


def test_metrics_are_compared_by_name() -> None:
    found = differences(
        OptimStepDone(metrics={"a": 1.0, "b": 2.0}), OptimStepDone(metrics={"a": 1.5, "c": 2.0})
    )
    assert [(one.field, one.by) for one in found] == [
        ("metrics.a", 0.5),
        ("metrics.b", None),
        ("metrics.c", None),
    ]


def test_another_shape_is_named_and_not_subtracted() -> None:
    a, b = done([1.0]), done([1.0, 2.0])
    assert differences(a, b) == (
        Difference(field="loss_fn_outputs[0].logprobs", published="float32 (1,)", replayed="float32 (2,)"),
    )


def test_another_kind_of_result_is_told_with_its_error() -> None:
    (found,) = differences(Failed(error="no", category="user"), OptimStepDone(metrics={}))
    assert (found.published, found.replayed) == ("failed: no", "optim_step_done")


def test_an_infinite_difference_has_no_size() -> None:
    (found,) = differences(OptimStepDone(metrics={"a": 1.0}), OptimStepDone(metrics={"a": float("inf")}))
    assert found.by is None


def test_integers_of_a_tensor_are_compared_too() -> None:
    a, b = (Tensor(dtype="int64", shape=(1,), data=struct.pack("<q", n)) for n in (3, 5))
    (found,) = differences(
        ForwardBackwardDone(loss_fn_outputs=({"t": a},), metrics={}),
        ForwardBackwardDone(loss_fn_outputs=({"t": b},), metrics={}),
    )
    assert found.by == 2


def test_a_tally_counts_each_verdict() -> None:
    tally = Tally(model_id="m", begins="creation")
    for verdict in ("same", "same", "differs"):
        tally.add(Checked(model_id="m", seq_id=1, verb="optim_step", verdict=verdict))  # type: ignore[arg-type]
    assert (tally.same, tally.differs, tally.expired) == (2, 1, 0)
