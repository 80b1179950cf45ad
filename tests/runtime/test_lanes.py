"""Who has the next turn. Pure: rank time is what the test says it is."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from runtime.lanes import Lanes


def served(lanes: Lanes, costs: dict[str, float], turns: int) -> Counter[str]:
    """Rank seconds per tenant, each with one model named as it is and a queue that never ends."""
    used: Counter[str] = Counter()
    for tenant in costs:
        lanes.add(tenant, tenant)
    for _ in range(turns):
        tenant = lanes.take()
        assert tenant is not None
        lanes.charge(tenant, costs[tenant])
        used[tenant] += costs[tenant]
        lanes.add(tenant, tenant)
    return used


@given(st.lists(st.integers(1, 50), min_size=2, max_size=5), st.integers(1, 200))
def test_tenants_with_full_queues_differ_by_one_operation_at_most(costs: list[int], turns: int) -> None:
    named = {str(n): float(cost) for n, cost in enumerate(costs)}
    used = served(Lanes(), named, turns)
    assert max(used[t] for t in named) - min(used[t] for t in named) <= max(costs)


def test_a_tenant_with_small_operations_waits_for_one_large_one_at_most() -> None:
    lanes = Lanes()
    served(lanes, {"large": 10.0}, 20)
    for _ in range(20):
        lanes.add("small", "small")
        order = [lanes.take(), lanes.take()]
        assert "small" in order
        lanes.charge("small", 0.1)
        lanes.charge("large", 10.0)
        lanes.add("large", "large")


def test_who_was_idle_has_no_credit() -> None:
    lanes = Lanes()
    served(lanes, {"busy": 1.0}, 100)
    used = served(lanes, {"busy": 1.0, "back": 1.0}, 20)
    assert abs(used["busy"] - used["back"]) <= 1.0


def test_one_tenants_models_rotate_and_count_as_one_tenant() -> None:
    lanes = Lanes()
    for model in ("a1", "a2", "a3"):
        lanes.add("a", model)
    lanes.add("b", "b1")
    order = []
    for _ in range(8):
        model = lanes.take()
        assert model is not None
        order.append(model)
        lanes.charge(model[0], 1.0)
        lanes.add(model[0], model)
    assert order == ["a1", "b1", "a2", "b1", "a3", "b1", "a1", "b1"]


def test_a_model_added_twice_has_one_turn() -> None:
    lanes = Lanes()
    lanes.add("a", "m")
    lanes.add("a", "m")
    assert (lanes.take(), lanes.take()) == ("m", None)


def test_a_model_that_is_dropped_has_no_turn_and_its_neighbour_has() -> None:
    lanes = Lanes()
    lanes.add("a", "m")
    lanes.add("a", "n")
    lanes.drop("a", "m")
    lanes.drop("b", "never there")
    assert (lanes.take(), lanes.take()) == ("n", None)
    lanes.add("a", "m")
    lanes.drop("a", "m")
    assert lanes.take() is None
