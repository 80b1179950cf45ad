"""Seeds, one after the other, against the one undisturbed run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from tests.chaos.compare import differences
from tests.chaos.plan import TENANTS
from tests.chaos.report import Seed, passed
from tests.chaos.run import Run
from tests.chaos.schedule import schedule
from tests.chaos.undisturbed import undisturbed

STEPS = 60
"""Of each tenant: enough that events lie apart."""


class Chaos:
    """Makes the undisturbed run when it is built. Raises Disturbed."""

    def __init__(
        self, work: Path, steps: int = STEPS, *, dp: int = 2, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self._work = work
        self._steps = steps
        self._dp = dp
        self._say = say
        self._wanted = undisturbed(work, steps, dp=dp, say=lambda what: say(f"undisturbed run: {what}"))

    def judge(self, seed: int) -> Seed:
        """Run a seed; its folder stays where something was wrong or slow."""
        folder = self._work / f"seed-{seed}"
        events = schedule(seed, self._steps * len(TENANTS))
        outcome = Run(
            folder, self._steps, events, dp=self._dp, say=lambda what: self._say(f"seed {seed}: {what}")
        ).go()
        faults = list(outcome.faults)
        if not faults:
            faults += differences(outcome, self._wanted, self._steps)
        judged = Seed(seed, outcome, tuple(faults))
        if passed([judged]):
            shutil.rmtree(folder, ignore_errors=True)
        return judged
