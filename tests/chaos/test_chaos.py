"""Kills and stops of every kind of process while tenants train: the same bits, nothing lost, nothing twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos.plan import TENANTS, steps
from tests.chaos.report import BEGIN, END, Seed, event_rows, kind_rows, passed, write
from tests.chaos.run import Hit, Outcome
from tests.chaos.schedule import HEARTBEAT_S, KILL, LAST_EVENT, LEASE_S, STOP, Event, Kind, schedule
from tests.chaos.seeds import Chaos

SEEDS = int(os.environ.get("CHAOS_SEEDS", "0"))
"""Four to seven minutes each on 2 cores. `make chaos` runs as many as asked for, and measures."""


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.skipif(
    SEEDS == 0, reason="CHAOS_SEEDS is how many seeds to run, some minutes each; or make chaos"
)
@pytest.mark.timeout(300 + 450 * SEEDS)
def test_tenants_end_with_the_same_bits_whatever_is_killed_or_stopped(tmp_path: Path) -> None:
    chaos = Chaos(tmp_path)
    for number in range(1, SEEDS + 1):
        seed = chaos.judge(number)
        assert not seed.faults, (number, seed.faults)
        assert {hit.event.kind for hit in seed.outcome.hits} == set(Kind)


def test_a_seed_is_a_schedule() -> None:
    assert schedule(7, 180) == schedule(7, 180)
    assert len({tuple(schedule(seed, 180)) for seed in range(50)}) == 50


@pytest.mark.parametrize("seed", range(50))
def test_every_kind_is_hit_once_in_order_of_its_moments_and_everything_at_last(seed: int) -> None:
    events = schedule(seed, 180)
    assert sorted(event.kind for event in events) == sorted(Kind)
    assert (events[-1].kind, events[-1].signal) == (Kind.EVERYTHING, KILL)
    moments = [event.after_steps for event in events]
    assert moments == sorted(moments)
    assert moments[-1] <= LAST_EVENT * 180


def test_stops_outlast_lease_and_heartbeat_and_kills_stop_nothing() -> None:
    events = [event for seed in range(50) for event in schedule(seed, 180)]
    assert {event.signal for event in events if event.kind is Kind.RANK} == {KILL, STOP}
    for event in events:
        if event.signal == STOP:
            assert event.stop_s > max(LEASE_S, HEARTBEAT_S)
        else:
            assert event.stop_s == 0


def test_tenants_differ_in_rank_loss_and_sizes_and_train_the_same_every_time() -> None:
    for field in ("rank", "loss", "seed"):
        assert len({getattr(tenant, field) for tenant in TENANTS}) == len(TENANTS)
    assert {tenant.over for tenant in TENANTS} == {"sdk", "nats"}
    assert steps(TENANTS[0], 5) == steps(TENANTS[0], 5)
    assert len({tuple(steps(tenant, 5)) for tenant in TENANTS}) == len(TENANTS)


def judged(recovered_s: float | None, *faults: str) -> Seed:
    hit = Hit(Event(Kind.RANK, KILL, after_steps=3, delay_s=0.1), 4.0, recovered_s)
    return Seed(1, Outcome(hits=[hit]), faults)


def test_a_seed_fails_that_has_a_fault_or_is_slower_than_its_limit() -> None:
    assert passed([judged(19.9)])
    assert not passed([judged(20.1)])
    assert not passed([judged(None)])
    assert not passed([judged(1.0, "one result is missing")])


def test_tables_show_the_longest_recovery_of_a_kind_and_go_into_their_section(tmp_path: Path) -> None:
    seeds = [judged(3.0), judged(21.0)]
    assert [row[-1] for row in event_rows(seeds)] == ["same bits", "same bits, **slow**"]
    assert kind_rows(seeds) == [("rank", "2", "21.0", "20", "1 of 2")]
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{BEGIN}\nold\n{END}\n\nafter\n")
    write(page, seeds)
    text = page.read_text()
    assert text.startswith(f"before\n\n{BEGIN}\n")
    assert text.endswith(f"{END}\n\nafter\n")
    assert "old" not in text
    assert "| rank | 2 | 21.0 | 20 | 1 of 2 |" in text
