"""The sequencer against a model of it: any arrivals, gaps, refusals, unloads, restarts and charges."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bus.log import LogEntry
from runtime.sequencer import GAP, Sequencer
from tests.runtime.test_sequencer import entry

MODELS = ("a1", "a2", "b1")
"""The first letter is the tenant."""
Decided = tuple[int | None, str, int | None]
"""(number, verb, the number it waited for in vain)."""


def expected(log: list[LogEntry]) -> list[Decided]:
    """One model's turns, worked out from its whole log: number after number, then what an unload cuts off."""
    unload = next((n for n, one in enumerate(log) if one.seq_id is None), None)
    by_number = {one.seq_id: one for one in reversed(log) if one.seq_id is not None}
    decided: list[Decided] = []
    number, lost, lost_at = 0, None, 0
    while number in by_number:
        one = by_number.pop(number)
        assert one.position is not None
        if one.verb == GAP:
            lost, lost_at = number, one.position
            decided.append((number, GAP, None))
        else:
            decided.append((number, one.verb, lost if one.position < lost_at else None))
        number += 1
    if unload is not None:
        decided += [(n, by_number[n].verb, number) for n in sorted(k for k in by_number if k is not None)]
        decided.append((None, "unload_model", None))
    return decided


class SequencerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[LogEntry] = []
        self.sequencer = Sequencer()
        self.turns: dict[str, list[Decided]] = {model: [] for model in MODELS}

    def _of(self, model: str) -> list[LogEntry]:
        return [one for one in self.log if one.model_id == model]

    def _append(self, model: str, seq_id: int | None, verb: str) -> None:
        """As the log does: an identity is stored once, and nothing follows an unload."""
        known = {one.seq_id for one in self._of(model)}
        if None in known or seq_id in known:
            return
        made = replace(entry(model, seq_id, len(self.log) + 1, verb), tenant=model[0])
        self.log.append(made)
        self.sequencer.offer(made)

    @rule(
        model=st.sampled_from(MODELS),
        seq_id=st.integers(0, 7),
        verb=st.sampled_from(["forward_backward", "optim_step", "refused"]),
    )
    def arrives(self, model: str, seq_id: int, verb: str) -> None:
        self._append(model, seq_id, verb)

    @rule(model=st.sampled_from(MODELS))
    def unloads(self, model: str) -> None:
        self._drain()
        self._append(model, None, "unload_model")

    @rule()
    def gives_up_on_what_is_missing(self) -> None:
        self._drain()
        for model, number in self.sequencer.missing().items():
            self._append(model, number, GAP)

    @rule(model=st.sampled_from(MODELS), seconds=st.floats(-1, 100))
    def ranks_took_time(self, model: str, seconds: float) -> None:
        self.sequencer.charge(model[0], seconds)

    @rule()
    def takes_one_turn(self) -> None:
        turn = self.sequencer.next_turn()
        if turn is not None:
            one = turn.entry
            self.turns[one.model_id].append((one.seq_id, one.verb, turn.lost))

    @rule(model=st.sampled_from(MODELS))
    def a_request_goes_along_with_the_one_before(self, model: str) -> None:
        """As the dispatcher does behind a turn of this model, for what can go in one pass with it."""
        if not self.turns[model] or (ahead := self.sequencer.ahead(model)) is None or ahead.verb == GAP:
            return
        turn = self.sequencer.follow(model)
        assert turn.entry is ahead
        self.turns[model].append((ahead.seq_id, ahead.verb, turn.lost))

    def _drain(self) -> None:
        before = -1
        while before != (before := sum(map(len, self.turns.values()))):
            self.takes_one_turn()

    @rule(model=st.sampled_from(MODELS), behind=st.integers(1, 3), after=st.integers(0, 3))
    def loses_a_number(self, model: str, behind: int, after: int) -> None:
        """The next number never comes: what came before the gap was written fails, what comes after runs."""
        self._drain()
        lost = max((n for n, _, _ in self.turns[model] if n is not None), default=-1) + 1
        for number in range(lost + 1, lost + 1 + behind):
            self._append(model, number, "forward_backward")
        self._append(model, lost, GAP)
        for number in range(lost + 1 + behind, lost + 1 + behind + after):
            self._append(model, number, "optim_step")

    @rule()
    def restarts_from_snapshots(self) -> None:
        """As a new life does that has each model's state, and of the log what stands from `log_from` on."""
        old, self.sequencer = self.sequencer, Sequencer()
        resumed = [m for m in MODELS if self.turns[m] and self.turns[m][-1][0] is not None]
        states = {model: old.state(model, len(self.log)) for model in resumed}
        for model in resumed:
            self.sequencer.resume(model, states[model])
        for one in self.log:
            assert one.position is not None
            if one.model_id in states:
                needed = one.position >= states[one.model_id].log_from
                if needed and not self.sequencer.taken(one.model_id, one.seq_id):
                    self.sequencer.offer(one)
            elif not self.turns[one.model_id]:
                self.sequencer.offer(one)

    @rule()
    def restarts(self) -> None:
        """A new life reads the same log; what it decides must begin with what was decided before."""
        before, self.turns = self.turns, {model: [] for model in MODELS}
        self.sequencer = Sequencer()
        for one in self.log:
            self.sequencer.offer(one)
        self._drain()
        for model in MODELS:
            assert self.turns[model][: len(before[model])] == before[model]

    @invariant()
    def what_was_decided_is_a_beginning_of_what_the_log_says(self) -> None:
        for model in MODELS:
            told = expected(self._of(model))
            assert self.turns[model] == told[: len(self.turns[model])]

    def teardown(self) -> None:
        self._drain()
        for model in MODELS:
            assert self.turns[model] == expected(self._of(model))


TestSequencerMachine = SequencerMachine.TestCase
TestSequencerMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
