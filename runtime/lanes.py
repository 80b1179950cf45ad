"""Fair turns between tenants by the rank time they used, and between one tenant's models in rotation.

Pure. The tenant with the least rank time has the next turn. Who was idle comes back at the time at which the last turn
was given: being idle earns no credit. Only the order between models depends on this, never what a model does.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Tenant:
    used: float = 0.0
    """Rank seconds, raised to the others' when it comes back from being idle."""
    turn: int = 0
    """Number of its last turn: of two that used the same, the one that waited longer is first."""
    ready: OrderedDict[str, None] = field(default_factory=OrderedDict)


class Lanes:
    """Models that have something to do, by tenant."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._ready: OrderedDict[str, _Tenant] = OrderedDict()
        self._now = 0.0
        self._turns = 0

    def add(self, tenant: str, model_id: str) -> None:
        """This model has something to do; it comes behind its tenant's other models. Twice is once."""
        lane = self._tenants.setdefault(tenant, _Tenant())
        if tenant not in self._ready:
            lane.used = max(lane.used, self._now)
            self._ready[tenant] = lane
        lane.ready.setdefault(model_id)

    def take(self) -> str | None:
        """The model whose turn it is, no longer waiting then; None while there is none. O(tenants that wait)."""
        if not self._ready:
            return None
        tenant = min(self._ready, key=lambda name: (self._ready[name].used, self._ready[name].turn))
        lane = self._ready[tenant]
        if lane.used > self._now:
            self._now = lane.used
            self._forget_the_idle()
        self._turns += 1
        lane.turn = self._turns
        model_id, _ = lane.ready.popitem(last=False)
        if not lane.ready:
            del self._ready[tenant]
        return model_id

    def drop(self, tenant: str, model_id: str) -> None:
        """This model has nothing to do any more."""
        lane = self._ready.get(tenant)
        if lane is not None and model_id in lane.ready:
            del lane.ready[model_id]
            if not lane.ready:
                del self._ready[tenant]

    def _forget_the_idle(self) -> None:
        """Who has nothing to do and would come back with what everybody begins with need not be kept."""
        idle = [name for name, lane in self._tenants.items() if not lane.ready and lane.used <= self._now]
        for name in idle:
            del self._tenants[name]

    def charge(self, tenant: str, seconds: float) -> None:
        """Rank time that this tenant uses; below 0 takes back what an estimate was too large by."""
        self._tenants.setdefault(tenant, _Tenant(self._now)).used += seconds
