"""Patience with a broker that is away."""

from __future__ import annotations

import pytest

from bus.connection import BrokerUnreachable, WrongCredentials
from bus.log import LogFull
from bus.publish import StreamFull
from bus.results import ResultsFull
from runtime import services
from runtime.services import patiently


class Attempts:
    """Fails with each of `errors` in turn, then answers."""

    def __init__(self, *errors: Exception) -> None:
        self.left = list(errors)

    async def __call__(self) -> str:
        if self.left:
            raise self.left.pop(0)
        return "answer"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "RETRY_S", 0.001)


async def test_a_broker_that_is_away_is_waited_for() -> None:
    away = BrokerUnreachable("away")
    assert await patiently(Attempts(away, away, away)) == "answer"
    assert await patiently(Attempts(away, away, away), for_s=60) == "answer"


async def test_a_broker_without_room_is_waited_for() -> None:
    full = [StreamFull("a row"), ResultsFull("a result"), LogFull("an operation")]
    assert await patiently(Attempts(*full)) == "answer"


async def test_it_ends_with_the_last_error_when_the_time_is_up() -> None:
    with pytest.raises(BrokerUnreachable, match="first"):
        await patiently(Attempts(BrokerUnreachable("first"), BrokerUnreachable("second")), for_s=0)


async def test_what_waiting_does_not_mend_is_told_at_once() -> None:
    with pytest.raises(WrongCredentials):
        await patiently(Attempts(WrongCredentials("no")), for_s=60)
