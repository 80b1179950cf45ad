"""What goes to the ranks together, and what does not. A stand-in group records what it is handed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.contract import PassFailed
from actors.group import RequestOutput
from runtime.passes import MOST_TOGETHER, Passes


class Request:
    """All that is asked of a packed request here."""

    def __init__(self, number: int, *, forward_only: bool = False) -> None:
        self.number = number
        self.forward_only = forward_only


class Group:
    """Operations end when the test says so."""

    def __init__(self) -> None:
        self.handed: list[tuple[str, list[int]]] = []
        self._ends: list[asyncio.Future[Any]] = []

    def forward_backward_together(
        self, model_id: str, requests: list[Request], labels: list[int]
    ) -> asyncio.Task[Any]:
        assert [request.number for request in requests] == labels
        return self._started(model_id, labels)

    def optim_step(self, model_id: str) -> asyncio.Task[Any]:
        return self._started(f"{model_id} steps", [])

    def _started(self, what: str, labels: list[int]) -> asyncio.Task[Any]:
        self.handed.append((what, labels))
        self._ends.append(asyncio.get_running_loop().create_future())
        return asyncio.ensure_future(self._ended(self._ends[-1]))

    async def _ended(self, end: asyncio.Future[Any]) -> Any:
        return await end

    async def end(self, answer: Any) -> None:
        """The oldest operation ends."""
        end = self._ends.pop(0)
        if isinstance(answer, BaseException):
            end.set_exception(answer)
        else:
            end.set_result(answer)
        for _ in range(5):
            await asyncio.sleep(0)


def output(number: int) -> RequestOutput:
    return RequestOutput([], {"number": float(number)})


def passes() -> tuple[Any, Group]:
    group = Group()
    made: Any = Passes(group)  # type: ignore[arg-type]
    return made, group


async def test_the_first_two_go_at_once_and_what_comes_meanwhile_goes_together() -> None:
    way, group = passes()
    answers = [way.forward_backward("m", Request(n), n) for n in range(4)]
    assert group.handed == [("m", [0]), ("m", [1])]
    await group.end([output(0)])
    assert group.handed[2:] == [("m", [2, 3])]
    await group.end([output(1)])
    await group.end([output(2), output(3)])
    assert [(await answer).metrics["number"] for answer in answers] == [0, 1, 2, 3]


async def test_what_is_given_together_goes_as_one_pass_to_idle_ranks_too() -> None:
    way, group = passes()
    with way.together():
        answers = [way.forward_backward("m", Request(n), n) for n in range(3)]
        assert group.handed == []
    assert group.handed == [("m", [0, 1, 2])]
    way.forward_backward("m", Request(3), 3)
    with way.together():
        for n in (4, 5):
            way.forward_backward("m", Request(n), n)
        await group.end([output(0), output(1), output(2)])  # room for one, but the pass is not yet whole
        way.forward_backward("m", Request(6), 6)
    assert group.handed[1:] == [("m", [3]), ("m", [4, 5, 6])]
    assert [(await answer).metrics["number"] for answer in answers] == [0, 1, 2]


async def test_what_is_given_together_waits_like_all_else_while_two_are_at_the_ranks() -> None:
    way, group = passes()
    for n in range(2):
        way.forward_backward("m", Request(n), n)
    with way.together():
        for n in (2, 3):
            way.forward_backward("m", Request(n), n)
    assert group.handed == [("m", [0]), ("m", [1])]
    await group.end([output(0)])
    assert group.handed[2:] == [("m", [2, 3])]


async def test_a_pass_is_of_one_model_one_kind_and_so_many_at_most() -> None:
    way, group = passes()
    for n in range(2 + MOST_TOGETHER + 1):
        way.forward_backward("m", Request(n), n)
    way.forward_backward("m", Request(90, forward_only=True), 90)
    way.forward_backward("other", Request(91), 91)
    way.flush()
    full = list(range(2, 2 + MOST_TOGETHER))
    last = 2 + MOST_TOGETHER
    assert group.handed[2:] == [("m", full), ("m", [last]), ("m", [90]), ("other", [91])]


async def test_any_other_operation_comes_behind_what_was_there_before() -> None:
    way, group = passes()
    for n in range(3):
        way.forward_backward("m", Request(n), n)
    way.track(way.group().optim_step("m"))
    assert group.handed[2:] == [("m", [2]), ("m steps", [])]


async def test_one_request_of_a_pass_fails_alone() -> None:
    way, group = passes()
    answers = [way.forward_backward("m", Request(n), n) for n in range(4)]
    await group.end([output(0)])
    await group.end([output(1)])
    await group.end([PassFailed("loss"), output(3)])
    with pytest.raises(PassFailed, match="loss"):
        await answers[2]
    assert (await answers[3]).metrics == {"number": 3}


async def test_what_ends_the_group_ends_every_wait() -> None:
    way, group = passes()
    answers = [way.forward_backward("m", Request(n), n) for n in range(4)]
    await group.end([output(0)])
    await group.end(RuntimeError("a rank died"))
    await group.end(RuntimeError("a rank died"))
    for answer in answers[1:]:
        with pytest.raises(RuntimeError, match="a rank died"):
            await answer
