"""The benchmark's arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.bench.timing import Figures, combined, percentile


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_a_percentile_is_numpys(values: list[float], share: float) -> None:
    assert percentile(values, share) == pytest.approx(
        float(np.percentile(values, share * 100)), rel=1e-9, abs=1e-9
    )


def test_runs_of_one_way_combine_to_medians() -> None:
    runs = [Figures("SDK", 10, 1, 9), Figures("SDK", 30, 3, 5), Figures("SDK", 20, 2, 7)]
    assert combined(runs) == Figures("SDK", 20, 2, 7)
