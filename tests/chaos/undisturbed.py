"""The run that nothing happens to, made once for all seeds of a work folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from tests.chaos import plan
from tests.chaos.run import CONFIG, Outcome, Run


class Disturbed(RuntimeError):
    """Something went wrong although nothing was done; no seed means anything then."""


def undisturbed(work: Path, steps: int, *, dp: int, say: Callable[[str], None]) -> Outcome:
    """From `work` where an earlier run of the same plan left it, else run now. Raises Disturbed."""
    planned = repr([(tenant, plan.steps(tenant, steps)) for tenant in plan.TENANTS])
    folder = work / f"undisturbed-{hashlib.sha256((planned + CONFIG + str(dp)).encode()).hexdigest()[:12]}"
    kept = folder / "outcome.json"
    if kept.is_file():
        told = json.loads(kept.read_text())
        return Outcome(records=told["records"], models=told["models"], dumps=folder / "dumps")
    outcome = Run(folder, steps, dp=dp, say=say).go()
    if outcome.faults:
        raise Disturbed("; ".join(outcome.faults))
    kept.write_text(json.dumps({"records": outcome.records, "models": outcome.models}))
    return outcome
