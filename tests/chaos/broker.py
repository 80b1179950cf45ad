"""What the broker says has been answered, asked with the servers' own account."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import nats.js.errors

from bus import subjects
from bus.broker_config import SERVER_USER
from bus.connection import Bus, Credentials, connect
from runtime.service import GROUP
from tests.support.service import Service

TENANT = "default"


async def _open(service: Service) -> Bus:
    password = (service.data / "nats" / "server.password").read_text().strip()
    return await connect(service.nats, Credentials(SERVER_USER, password), name="chaos")


def newest_results(service: Service, models: Mapping[str, str]) -> dict[str, int]:
    """By tenant, the highest number of its model's that has a result; `models` holds their ids."""
    patterns = {tenant: subjects.results_of(TENANT, model_id) for tenant, model_id in models.items()}
    return asyncio.run(_newest(service, subjects.RESULTS_STREAM, patterns))


def newest_accepted(service: Service, models: Mapping[str, str]) -> dict[str, int]:
    """By tenant, the highest number of its model's that is on the log."""
    every = f"{subjects.PREFIX}.ops.{subjects.escape(GROUP)}"
    patterns = {tenant: f"{every}.{subjects.escape(model_id)}.*" for tenant, model_id in models.items()}
    return asyncio.run(_newest(service, subjects.OPS_STREAM, patterns))


async def _newest(service: Service, stream: str, patterns: Mapping[str, str]) -> dict[str, int]:
    newest = {}
    async with await _open(service) as bus:
        for tenant, pattern in patterns.items():
            try:
                last = await bus.js.get_last_msg(stream, pattern)
            except nats.js.errors.NotFoundError:
                newest[tenant] = 0
            else:
                assert last.subject is not None
                newest[tenant] = int(last.subject.rpartition(".")[2])
    return newest


def count_results(service: Service, model_id: str) -> dict[int, int]:
    """How many results each number of the model has on the stream."""

    async def ask() -> dict[int, int]:
        async with await _open(service) as bus:
            about = await bus.js.stream_info(
                subjects.RESULTS_STREAM, subjects_filter=subjects.results_of(TENANT, model_id)
            )
        found = about.state.subjects or {}
        return {int(subject.rpartition(".")[2]): count for subject, count in found.items()}

    return asyncio.run(ask())
