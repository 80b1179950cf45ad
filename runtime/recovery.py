"""The first half of a recovery: every model from its newest snapshot. The log's replay is the other half."""

from __future__ import annotations

import asyncio
import logging

from actors.contract import PassFailed
from actors.group import MegatronGroup
from bus.tables import ModelRow
from runtime import fingerprint
from runtime.hand_over import HandOver
from runtime.sequencer import LaneState, Sequencer
from runtime.services import Services, patiently
from runtime.snapshots import Snapshot, Snapshots

log = logging.getLogger(__name__)


class Recovery:
    """Of one life of a group."""

    def __init__(
        self, services: Services, group: MegatronGroup, kept: Snapshots, bits: dict[str, str]
    ) -> None:
        """`bits`: what they depend on here and now, see `runtime.fingerprint`."""
        self._s = services
        self._group = group
        self._snapshots = kept
        self._fingerprint = bits

    async def resume(self, sequencer: Sequencer, hand_over: HandOver) -> set[str]:
        """Every live model that has a snapshot goes on from its newest that can be used; which models have ended.

        Raises FingerprintDiffers, NewerFormat, GroupDied.
        """
        done_with = set()
        for key, row in (await patiently(self._s.tables.models.all)).items():
            model_id = str(key)
            if row.status == "unloaded":
                done_with.add(model_id)
                sequencer.end(model_id)
                hand_over.end(model_id)
            elif row.status == "live":
                await self._resume_model(model_id, row, sequencer, hand_over)
        return done_with

    async def _resume_model(
        self, model_id: str, row: ModelRow, sequencer: Sequencer, hand_over: HandOver
    ) -> None:
        for found in await asyncio.to_thread(self._snapshots.of, model_id):
            if await self._restored(model_id, found):
                manifest = found.manifest
                sequencer.resume(model_id, manifest.lane)
                hand_over.resume(model_id, manifest.config)
                hand_over.lost.resume(model_id, manifest.window)
                self._s.recorder.begin(model=model_id)
                return
        if row.trimmed_below:
            because = "none of its snapshots can be read, and the log begins after its creation"
            log.error("model %s is lost: %s", model_id, because)
            sequencer.resume(model_id, LaneState(next_seq=row.trimmed_below))
            hand_over.lose(model_id, because)

    async def _restored(self, model_id: str, found: Snapshot) -> bool:
        """Whether every rank has it; if not, no rank does."""
        manifest, settings = found.manifest, self._s.settings.recovery
        for word in fingerprint.compare(
            manifest.fingerprint, self._fingerprint, accept_new_bits=settings.accept_new_bits
        ):
            log.warning("model %s goes on with other bits: %s", model_id, word)
        try:
            await self._group.restore(model_id, manifest.config, found.folder)
        except PassFailed as error:
            log.warning("snapshot %s cannot be used: %s", found.folder, error)
            return False
        return True
