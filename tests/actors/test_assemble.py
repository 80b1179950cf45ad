"""The ranks' parts of an answer, put back into the request's order."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from actors.contract import MicrobatchOutput
from actors.group import assemble


def answer(index: int, *logprobs: list[float], loss: float = 0.0) -> MicrobatchOutput:
    arrays = [np.float32(values) for values in logprobs]
    return MicrobatchOutput(index, arrays, {"loss:sum": loss, "rollout_gap_abs:max": loss})


def test_outputs_come_back_in_the_requests_order_whichever_rank_ran_them() -> None:
    request = SimpleNamespace(microbatches=((0, 3), (1, 4), (2,)), lengths=(2, 1, 3, 2, 1))
    of_rank_0 = [answer(0, [0.0, 0.5], [3.0, 3.5], loss=1.0), answer(2, [2.0, 2.25, 2.5], loss=0.25)]
    of_rank_1 = [answer(1, [1.0], [4.0], loss=8.0)]
    for parts in (of_rank_0 + of_rank_1, of_rank_1 + of_rank_0, of_rank_0[::-1] + of_rank_1):
        output = assemble(request, parts)  # type: ignore[arg-type]
        assert [values.tolist() for values in output.logprobs] == [
            [0.0, 0.5],
            [1.0],
            [2.0, 2.25, 2.5],
            [3.0, 3.5],
            [4.0],
        ]
        assert output.metrics == {"loss:sum": 9.25, "rollout_gap_abs:max": 8.0}


@pytest.mark.parametrize("indices", [[0, 2], [0, 1, 1, 2], [], [0, 1, 2, 3]])
def test_an_answer_that_is_missing_or_twice_there_is_an_error(indices: list[int]) -> None:
    request = SimpleNamespace(microbatches=((0,), (1,), (2,)), lengths=(1, 1, 1))
    with pytest.raises(RuntimeError, match="of 3"):
        assemble(request, [answer(i, [0.0]) for i in indices])  # type: ignore[arg-type]
