"""Whether a disturbed run came to what the undisturbed one came to, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.chaos.run import Outcome
from tests.support import dumps


def differences(found: Outcome, wanted: Outcome, steps: int) -> Iterator[str]:
    """In words; none where every result and the final weights and optimizer states are the same bits."""
    for tenant, records in wanted.records.items():
        mine = found.records.get(tenant, [])
        if len(mine) != len(records):
            yield f"{tenant}: {len(mine)} results instead of {len(records)}"
        for place, (left, right) in enumerate(zip(mine, records, strict=False)):
            if left != right:
                yield f"{tenant}: result {place} is {left} instead of {right}"
                break
        if (step := first_other_step(found, wanted, tenant, steps)) is not None:
            yield f"{tenant}: weights or optimizer state differ, first after step {step + 1}"


def first_other_step(found: Outcome, wanted: Outcome, tenant: str, steps: int) -> int | None:
    """Where a tenant's weights and Adam moments part ways; None where the last step has the same bits."""
    if same_bits(found, wanted, tenant, steps - 1):
        return None
    return next(step for step in range(steps) if not same_bits(found, wanted, tenant, step))


def same_bits(found: Outcome, wanted: Outcome, tenant: str, step: int) -> bool:
    left = dumps.read(found.dumps, found.models[tenant], step)
    right = dumps.read(wanted.dumps, wanted.models[tenant], step)
    return all(
        left[kind].keys() == right[kind].keys()
        and len(right[kind]) > 0
        and all(torch.equal(left[kind][name], tensor) for name, tensor in right[kind].items())
        for kind in dumps.KINDS
    )
