"""A verification from start to end: finds the log, starts ranks that belong to nobody else, and stops it all again."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path

from actors.group import GroupConfig, MegatronGroup
from bus.connection import Credentials, connect
from runtime import base_model
from runtime.checkpoints.loading import Loading
from runtime.checkpoints.store import of_service
from runtime.config import Settings
from runtime.dispatcher import base_of, group_config
from runtime.fingerprint import fingerprint
from runtime.hand_over import packing
from runtime.log_source import broker
from runtime.log_view import NotThere
from runtime.service import GROUP, ray_running
from runtime.snapshots import Snapshots
from runtime.verdicts import Checked, Tally
from runtime.verify import Plan, Progress, Sources, Verifier, check_bits, plans

Tell = Callable[[Checked | Tally], None]
Say = Callable[[str], None]


def verify(settings: Settings, model_id: str | None, *, accept_new_bits: bool, say: Say, tell: Tell) -> None:
    """Run one model's operations again, or those of all. `tell` hears each verdict, and each model's tally after them.

    Raises NotThere, FingerprintDiffers, GroupDied, BrokerError, CodecError; ValueError for settings that cannot serve.
    """
    base_model.check(settings)
    with (
        broker(settings) as (url, credentials),
        tempfile.TemporaryDirectory(prefix="tinkerbus-verify-") as scratch,
    ):
        asyncio.run(_looked(url, credentials, settings, model_id))  # before seconds go into starting Ray
        say("starting Ray")
        with ray_running(Path(scratch)) as gpus:
            config = scratch_group(settings, base_model.folder(settings), Path(scratch), gpus=gpus)
            asyncio.run(
                _verify(url, credentials, settings, model_id, config, accept_new_bits, say=say, tell=tell)
            )


def scratch_group(settings: Settings, folder: Path, scratch: Path, *, gpus: bool) -> GroupConfig:
    """The service's group, except for where it writes."""
    config = group_config(settings, folder, gpus=gpus)
    engine = dataclasses.replace(config.engine, dump_gradients=None, away=scratch / "away")
    return dataclasses.replace(config, engine=engine)


async def _looked(
    url: str, credentials: Credentials | None, settings: Settings, model_id: str | None
) -> None:
    """Raises NotThere for what is not there, or is another service's."""
    async with await connect(url, credentials, name="log") as bus:
        sources = await Sources.open(bus, GROUP)
        await plans(sources, _snapshots(settings), model_id)
        served = await sources.base_model()
        if served is not None and served != settings.served_name:
            raise NotThere(
                f"the service serves base model {served!r}, and these settings name {settings.served_name!r}: "
                "give the settings that the service runs with"
            )


async def _verify(
    url: str,
    credentials: Credentials | None,
    settings: Settings,
    model_id: str | None,
    config: GroupConfig,
    accept_new_bits: bool,
    *,
    say: Say,
    tell: Tell,
) -> None:
    async with await connect(url, credentials, name="log") as bus:
        sources = await Sources.open(bus, GROUP)
        todo, snapshots = await plans(sources, _snapshots(settings), model_id)
        bits = fingerprint(config, packing(settings))
        for word in check_bits([s.manifest.fingerprint for s in snapshots], bits, accept=accept_new_bits):
            say(f"with other bits: {word}")
        say("starting the ranks")
        group = await MegatronGroup.start(config)
        try:
            verifier = Verifier(settings, sources, group, _loading(settings, sources, config))
            for number, one in enumerate(todo, 1):
                say(f"model {one.model_id}, {number} of {len(todo)}: {one.entries} operations")
                await _model(verifier, one, tell)
        finally:
            group.close()


def _loading(settings: Settings, sources: Sources, config: GroupConfig) -> Loading | None:
    """From the service's checkpoints, which it only reads."""
    if sources.checkpoints is None:
        return None
    folder, away = config.engine.model_folder, config.engine.away
    assert away is not None, "a scratch group has a folder of its own"
    store = of_service(settings, away.parent / "saving")
    return Loading(sources.checkpoints, store, base_of(settings, folder).identity, _nothing_is_saved)


async def _nothing_is_saved(_: str) -> None:
    return None


async def _model(verifier: Verifier, plan: Plan, tell: Tell) -> None:
    progress, tally = Progress(), Tally(model_id=plan.model_id, begins="")
    async with contextlib.aclosing(verifier.model(plan, progress)) as found:
        async for checked in found:
            tally.add(checked)
            tell(checked)
    tally.begins = progress.begins
    tell(tally)


def _snapshots(settings: Settings) -> Snapshots:
    return Snapshots.to_read(Path(settings.data).resolve() / "snapshots" / GROUP)
