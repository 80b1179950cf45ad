from __future__ import annotations

import pytest

from bus.backlog import Load
from runtime.admission import over

OPS, BYTES = ("limits.ops", 3), ("limits.bytes", 100)


@pytest.mark.parametrize(
    ("load", "size", "says"),
    [
        (Load(2, 90), 10, None),
        (Load(3, 0), 1, "m has 3 operations without a result; the limit is 3 (limits.ops)"),
        (
            Load(1, 90),
            11,
            "m has 90 bytes of operations without a result, and this one has 11; the limit is 100",
        ),
    ],
)
def test_a_limit_is_named_with_what_is_there(load: Load, size: int, says: str | None) -> None:
    found = over(load, size, "m", OPS, BYTES)
    assert found == says or (says is not None and found is not None and found.startswith(says))


def test_zero_is_no_limit() -> None:
    assert over(Load(10**9, 10**15), 10**9, "m", ("ops", 0), ("bytes", 0)) is None
