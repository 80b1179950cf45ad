"""Places between two effects at which a process of a server can be killed, once.

The file FAULT_FILE says `<place> <model_id>`. The process that comes there first takes the file away and gets SIGKILL,
at that very line.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_OTHERS_GO_ON_S = 0.5
"""Before one rank of several is killed: the others do meanwhile what they can do without it."""


def die_at(place: str, model_id: str) -> None:
    file = Path(os.environ["FAULT_FILE"])
    try:
        if file.read_text() != f"{place} {model_id}":
            return
        file.rename(file.with_suffix(".done"))
    except FileNotFoundError:
        return  # nothing is asked for, or another process was first
    os.kill(os.getpid(), signal.SIGKILL)


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank()


def _die_alone(place: str, model_id: str) -> None:
    if _rank() == 1:
        time.sleep(_OTHERS_GO_ON_S if Path(os.environ["FAULT_FILE"]).exists() else 0)
        die_at(place, model_id)


_at: dict[str, str] = {}
"""What this rank's engine works on: "model"."""


def _engine(module: Any) -> None:
    for name in ("forward_backward", "optim_step", "snapshot"):
        setattr(module.Engine, name, _noting(getattr(module.Engine, name)))


def _noting(right: Callable[..., Any]) -> Callable[..., Any]:
    def noted(self: Any, model_id: str, *arguments: Any) -> Any:
        _at["model"] = model_id
        return right(self, model_id, *arguments)

    return noted


def _window(module: Any) -> None:
    add, finalize = module.Window.add, module.Window.finalize

    def dying_add(self: Any, microbatches: int, tokens: int) -> None:
        _die_alone("gradient added on rank 0 alone", _at["model"])
        add(self, microbatches, tokens)

    def dying_finalize(self: Any) -> None:
        if _rank() == 1:
            die_at("rank 0 waits in finalize", _at["model"])
        finalize(self)
        if _rank() == 0:
            die_at("finalized, not stepped", _at["model"])

    module.Window.add, module.Window.finalize = dying_add, dying_finalize


def _optimizer(module: Any) -> None:
    step = module.step

    def dying_step(optimizer: Any, adam: Any, norm: float) -> None:
        _die_alone("stepped on rank 0 alone", _at["model"])
        step(optimizer, adam, norm)
        if _rank() == 0:
            die_at("stepped, not answered", _at["model"])

    module.step = dying_step


def _before(owner: Any, name: str, place: str, model_of: Callable[..., str]) -> None:
    right = getattr(owner, name)

    async def dying(self: Any, *arguments: Any, **options: Any) -> Any:
        die_at(place, model_of(*arguments))
        return await right(self, *arguments, **options)

    setattr(owner, name, dying)


def _after(owner: Any, name: str, place: str, model_of: Callable[..., str]) -> None:
    right = getattr(owner, name)

    async def dying(self: Any, *arguments: Any, **options: Any) -> Any:
        answer = await right(self, *arguments, **options)
        die_at(place, model_of(*arguments))
        return answer

    setattr(owner, name, dying)


def _settling(module: Any) -> None:
    _before(
        module.Settling, "settle", "answered, result not published", lambda job, _: str(job.entry.model_id)
    )
    _before(
        module.Settling,
        "_record",
        "result published, not in the ledger",
        lambda entry, *_: str(entry.model_id),
    )
    _after(module.Settling, "_record", "in the ledger, not settled", lambda entry, *_: str(entry.model_id))


def _snapshots(module: Any) -> None:
    commit, sync = module.Snapshots.commit, module._sync
    of = {"model": ""}

    def dying_commit(self: Any, aside: Path, manifest: Any) -> None:
        of["model"] = manifest.model_id
        die_at("snapshot written, without a manifest", manifest.model_id)
        commit(self, aside, manifest)
        die_at("snapshot there, row not changed", manifest.model_id)

    def dying_sync(folder: Path) -> None:
        die_at("snapshot with a manifest, not renamed", of["model"])
        sync(folder)

    module.Snapshots.commit, module._sync = dying_commit, dying_sync


def _log(module: Any) -> None:
    _before(module.OpsLog, "trim", "row says trimmed, log is not", lambda model_id, *_: str(model_id))
    _after(module.OpsLog, "trim", "log trimmed", lambda model_id, *_: str(model_id))
    _after(module.OpsLog, "append", "on the log, sender not answered", lambda entry: str(entry.model_id))


PATCHES = {
    "actors.engine": _engine,
    "actors.optimizer": _optimizer,
    "actors.window": _window,
    "bus.log": _log,
    "runtime.settling": _settling,
    "runtime.snapshots": _snapshots,
}
