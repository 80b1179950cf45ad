"""What nothing needs any more: operations and ledger rows of models that have ended and whose results have expired.

From then on every request id of such a model is answered with 410, by its row in the table of models alone.
"""

from __future__ import annotations

from bus.ledger import Ledger
from bus.log import OpsLog
from bus.results import Results
from bus.tables import ModelRow, Table
from runtime.services import Services


async def over(services: Services) -> list[str]:
    """Models that have operations on the log and no use for them. Raises BrokerUnreachable."""
    return await ended(services.log, services.results, services.tables.models)


async def ended(log: OpsLog, results: Results, models: Table[ModelRow]) -> list[str]:
    found = []
    rows = {str(key): row for key, row in (await models.all()).items() if row.status == "unloaded"}
    for model_id in sorted(await log.models() & rows.keys()):
        if not await results.numbers(rows[model_id].tenant, model_id):
            found.append(model_id)
    return found


async def drop(services: Services, model_id: str) -> None:
    """Idempotent, and may be interrupted: what is left of the model is found again by its operations."""
    await drop_from(services.log, services.ledger, model_id)


async def drop_from(log: OpsLog, ledger: Ledger, model_id: str) -> None:
    await ledger.forget(model_id)
    await log.drop(model_id)
