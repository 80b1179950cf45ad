"""What is refused before anything runs, with the field, what was found and what would be right."""

from __future__ import annotations

import math
import pickle

import pytest
import torch

from loss_hub import DatumInputs, InputError, UnknownLoss, check, names


def tensors(n: int = 3, **changes: object) -> dict[str, torch.Tensor]:
    """Sound inputs of an rl datum of length n; a change of None drops the input."""
    made: dict[str, object] = {
        "target_tokens": torch.arange(n),
        "logprobs": torch.full((n,), -1.0),
        "advantages": torch.ones(n),
    } | changes
    return {name: torch.as_tensor(value) for name, value in made.items() if value is not None}


def supervised(n: int = 3, **changes: object) -> dict[str, torch.Tensor]:
    return tensors(n, logprobs=None, advantages=None, **changes)


def refusal(loss_name: str, *data: DatumInputs, config=None, vocab_size=None) -> InputError:
    with pytest.raises(InputError) as caught:
        check(loss_name, config or {}, list(data), vocab_size=vocab_size)
    return caught.value


def assert_says(error: InputError, field: str, *parts: object) -> None:
    assert error.field == field
    assert str(error).startswith(field)
    for part in parts:
        assert str(part) in str(error)


def test_an_unknown_loss_lists_the_known_ones() -> None:
    error = refusal("gspo2", DatumInputs(3, tensors()))
    assert isinstance(error, UnknownLoss)
    assert_says(error, "loss.name", "gspo2", *names())


def test_an_empty_request_is_refused() -> None:
    assert_says(refusal("ppo"), "data", "at least one")


def test_a_datum_without_tokens_is_refused() -> None:
    assert_says(refusal("ppo", DatumInputs(0, tensors(0))), "data[0].model_input", "0 tokens", "at least one")


@pytest.mark.parametrize("name", ["target_tokens", "logprobs", "advantages"])
def test_a_missing_input_is_named_with_its_datum(name) -> None:
    error = refusal("dro", DatumInputs(3, tensors()), DatumInputs(3, tensors(**{name: None})))
    assert_says(error, f"data[1].loss_fn_inputs.{name}", "missing", "dro takes target_tokens")


@pytest.mark.parametrize("name", ["clip_low_threshold", "clip_high_threshold", "mask", "weights"])
def test_an_input_the_loss_does_not_take_is_refused_by_name(name) -> None:
    error = refusal("ppo", DatumInputs(3, tensors(**{name: torch.ones(3)})))
    assert_says(
        error, f"data[0].loss_fn_inputs.{name}", "unknown input", "target_tokens, logprobs, advantages"
    )


def test_advantages_under_cross_entropy_are_refused_by_name() -> None:
    error = refusal("cross_entropy", DatumInputs(3, tensors(logprobs=None)))
    assert_says(error, "data[0].loss_fn_inputs.advantages", "cross_entropy takes target_tokens, weights")


@pytest.mark.parametrize("name", ["target_tokens", "logprobs", "advantages"])
@pytest.mark.parametrize("length", [2, 5])
def test_another_length_than_the_datum_states_both(name, length) -> None:
    changed = {name: torch.ones(length, dtype=torch.int64)}
    error = refusal("ppo", DatumInputs(3, tensors(**changed)))
    assert_says(error, f"data[0].loss_fn_inputs.{name}", f"length {length}", "model_input has 3")


def test_weights_must_have_the_shape_of_the_targets() -> None:
    targets = torch.zeros(3, 2, dtype=torch.int64)
    field = "data[0].loss_fn_inputs.weights"
    flat = refusal("cross_entropy", DatumInputs(3, supervised(target_tokens=targets, weights=torch.ones(3))))
    assert_says(flat, field, "(3,)", "(3, 2)")
    narrow = refusal(
        "cross_entropy", DatumInputs(3, supervised(target_tokens=targets, weights=torch.ones(3, 1)))
    )
    assert_says(narrow, field, "(3, 1)", "(3, 2)")
    wide = refusal("cross_entropy", DatumInputs(3, supervised(weights=torch.ones(3, 2))))
    assert_says(wide, field, "(3, 2)", "(3,)")
    short = refusal(
        "cross_entropy", DatumInputs(3, supervised(target_tokens=targets, weights=torch.ones(2, 2)))
    )
    assert_says(short, field, "length 2", "has 3")


def test_rollout_losses_take_one_target_a_position() -> None:
    error = refusal("ppo", DatumInputs(3, tensors(target_tokens=torch.zeros(3, 2, dtype=torch.int64))))
    assert_says(error, "data[0].loss_fn_inputs.target_tokens", "(3, 2)", "one target a position")


@pytest.mark.parametrize("shape", [(3, 0), (3, 2, 2), ()])
def test_targets_of_an_impossible_shape_are_refused(shape) -> None:
    error = refusal(
        "cross_entropy", DatumInputs(3, supervised(target_tokens=torch.zeros(shape, dtype=torch.int64)))
    )
    assert_says(error, "data[0].loss_fn_inputs.target_tokens", str(shape), "(N, K)")


def test_two_dimensional_advantages_are_refused() -> None:
    error = refusal("ppo", DatumInputs(3, tensors(advantages=torch.ones(3, 1))))
    assert_says(error, "data[0].loss_fn_inputs.advantages", "(3, 1)", "(3,)")


def test_float_token_ids_and_other_dtypes_are_refused_by_name() -> None:
    ids = refusal("ppo", DatumInputs(3, tensors(target_tokens=torch.zeros(3))))
    assert_says(ids, "data[0].loss_fn_inputs.target_tokens", "float32", "int64, int32")
    for dtype in (torch.float64, torch.bool, torch.bfloat16):
        wide = refusal("ppo", DatumInputs(3, tensors(advantages=torch.ones(3, dtype=dtype))))
        assert_says(wide, "data[0].loss_fn_inputs.advantages", str(dtype)[6:], "float32, int64, int32")


def test_token_ids_outside_the_vocabulary_are_refused_with_value_and_limit() -> None:
    field = "data[0].loss_fn_inputs.target_tokens"
    high = refusal("ppo", DatumInputs(3, tensors(target_tokens=[1, 512, 511])), vocab_size=512)
    assert_says(high, field, "token id 512", "position 1", "has 512", "largest id is 511")
    negative = refusal("ppo", DatumInputs(3, tensors(target_tokens=[1, 2, -100])))
    assert_says(negative, field, "token id -100", "position 2", "start at 0")
    top_k = refusal(
        "cross_entropy", DatumInputs(2, supervised(2, target_tokens=[[0, 1], [2, 9]])), vocab_size=9
    )
    assert_says(top_k, field, "token id 9", "position 1, target 1")
    check("ppo", {}, [DatumInputs(3, tensors(target_tokens=[1, 2, 511]))], vocab_size=512)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused_with_field_and_position(value) -> None:
    advantages = refusal("ppo", DatumInputs(3, tensors(advantages=[0.0, value, 1.0])))
    assert_says(advantages, "data[0].loss_fn_inputs.advantages", value, "position 1", "finite")
    weights = refusal("cross_entropy", DatumInputs(3, supervised(weights=[1.0, 1.0, value])))
    assert_says(weights, "data[0].loss_fn_inputs.weights", value, "position 2", "finite")
    rollout = refusal("ppo", DatumInputs(3, tensors(logprobs=[-1.0, value, -1.0])))
    assert_says(rollout, "data[0].loss_fn_inputs.logprobs", value, "position 1", "advantages is not 0")
    check("ppo", {}, [DatumInputs(3, tensors(logprobs=[-1.0, value, -1.0], advantages=[1.0, 0.0, 1.0]))])
    no_advantage = {"logprobs": [-1.0, value, -1.0], "advantages": [1.0, 0.0, 1.0]}
    in_ratio = refusal("gspo", DatumInputs(3, tensors(sequence_ratio_mask=[0.0, 1.0, 1.0], **no_advantage)))
    assert_says(
        in_ratio, "data[0].loss_fn_inputs.logprobs", value, "position 1", "sequence_ratio_mask is not 0"
    )
    check("gspo", {}, [DatumInputs(3, tensors(sequence_ratio_mask=[1.0, 0.0, 1.0], **no_advantage))])


def test_integers_are_cast_to_the_dtype_the_loss_sees() -> None:
    sent = tensors(target_tokens=torch.arange(3, dtype=torch.int32), advantages=torch.tensor([1, 0, -2]))
    seen = check("ppo", {}, [DatumInputs(3, sent)]).batch([0])
    assert seen.targets_N.dtype == torch.int64
    assert seen.advantages_N.dtype == torch.float32
    assert seen.advantages_N.tolist() == [1.0, 0.0, -2.0]


# ---- batching


def test_a_batch_holds_the_chosen_datums_in_the_given_order() -> None:
    request = check(
        "ppo", {}, [DatumInputs(n, tensors(n, advantages=torch.full((n,), float(n)))) for n in (2, 1, 3)]
    )
    batch = request.batch([2, 0])
    assert batch.lengths == (3, 2)
    assert batch.targets_N.tolist() == [0, 1, 2, 0, 1]
    assert batch.advantages_N.tolist() == [3.0, 3.0, 3.0, 2.0, 2.0]
    with pytest.raises(ValueError, match="at least one"):
        request.batch([])


def test_datums_with_different_numbers_of_targets_share_a_batch_and_come_back_in_their_own_shape() -> None:
    data = [
        DatumInputs(1, supervised(1, target_tokens=[5], weights=[2.0])),
        DatumInputs(2, supervised(2, target_tokens=[[1, 2, 3], [4, 5, 6]], weights=torch.ones(2, 3))),
        DatumInputs(1, supervised(1, target_tokens=[[7]])),
    ]
    request = check("cross_entropy", {}, data)
    assert request.ks == (None, 3, 1)
    batch = request.batch([0, 1, 2])
    assert batch.targets_N.tolist() == [[5, 0, 0], [1, 2, 3], [4, 5, 6], [7, 0, 0]]
    assert batch.weights_N.tolist() == [[2.0, 0, 0], [1, 1, 1], [1, 1, 1], [1, 0, 0]]
    assert [part.tolist() for part in batch.split(batch.targets_N)] == [[5], [[1, 2, 3], [4, 5, 6]], [[7]]]
    assert request.batch([0]).targets_N.tolist() == [5]


def test_a_checked_request_survives_pickling_with_its_loss() -> None:
    request = check("ppo", {"clip_high_threshold": 1.5}, [DatumInputs(3, tensors())])
    copy = pickle.loads(pickle.dumps(request))
    assert copy.loss is request.loss
    assert copy.config == request.config
    assert torch.equal(copy.batch([0]).targets_N, request.batch([0]).targets_N)


def test_errors_survive_pickling() -> None:
    for error in (InputError("is wrong", "data"), UnknownLoss("x", ("a", "b"))):
        copy = pickle.loads(pickle.dumps(error))
        assert (str(copy), copy.field) == (str(error), error.field)
