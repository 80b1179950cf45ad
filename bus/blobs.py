"""Claim check: bodies that the broker cannot carry in one message, in a stream of their own, in pieces.

What travels instead is a reference: hash, size, and the length of a piece. A blob's subjects name its operation and
its hash, so that writing it again changes nothing, and two bodies under one number do not mix. It is dropped with
its model: until then a replay needs it.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass

from bus import scan, subjects
from bus.connection import HEADER_ROOM, BrokerError, Bus
from bus.publish import SubjectTaken, store

PIECE_BYTES = 2**20
"""At most; a broker's `max_payload` may ask for less."""

_TIMEOUT_S = 10.0
_TRIES, _PAUSE_S = 5, 0.1


class BlobLost(BrokerError):
    """The blob is not there, or not whole."""


@dataclass(frozen=True, slots=True)
class BlobRef:
    """What stands in the place of a body."""

    hash: str
    """blake2b-128 of the body, in hex."""
    size: int
    piece: int
    """Bytes of every piece but the last."""

    @property
    def pieces(self) -> int:
        return -(-self.size // self.piece)

    def __str__(self) -> str:
        return f"{self.hash}-{self.size}-{self.piece}"

    @classmethod
    def parse(cls, text: str) -> BlobRef:
        """The inverse of `str`. Raises ValueError."""
        digest, size, piece = text.split("-")
        ref = cls(digest, int(size), int(piece))
        if str(ref) != text or ref.size < 1 or ref.piece < 1:
            raise ValueError(f"{text!r} is no reference to a blob")
        return ref


class Blobs:
    """The blobs of one group's operations."""

    def __init__(self, bus: Bus, group: str) -> None:
        self._bus = bus
        self._group = group

    def ref(self, body: bytes) -> BlobRef | None:
        """The reference that has to stand for this body, or None where it fits into a message."""
        most = self._bus.max_payload - HEADER_ROOM
        if len(body) <= most:
            return None
        return BlobRef(_hash(body), len(body), min(most, PIECE_BYTES))

    async def put(self, model_id: str, seq_id: int | None, ref: BlobRef, body: bytes) -> None:
        """Store the body. Raises StreamFull, BrokerUnreachable; what is there then may be written again or dropped."""
        view = memoryview(body)
        for i in range(ref.pieces):
            try:
                await store(
                    self._bus,
                    subjects.blob(self._group, model_id, seq_id, str(ref), i),
                    bytes(view[i * ref.piece : (i + 1) * ref.piece]),
                    {},
                    doing=f"the body of number {subjects.seq_token(seq_id)} of model {model_id!r}",
                    expected_revision=0,
                    timeout_s=_TIMEOUT_S,
                )
            except SubjectTaken:
                continue  # the same piece: its subject names what it holds

    async def get(self, model_id: str, seq_id: int | None, ref: BlobRef) -> bytes:
        """The body, compared with its hash. Raises BlobLost, BrokerUnreachable."""
        pattern = subjects.blob(self._group, model_id, seq_id, str(ref), None)
        pieces: dict[int, bytes] = {}
        position, tries = 1, _TRIES
        while len(pieces) < ref.pieces and tries > 0:
            found = await scan.batch(self._bus, subjects.BLOB_STREAM, pattern, position)
            for message in found:
                position = message.position + 1
                pieces[int(message.subject.rpartition(".")[2])] = message.data
            if not found:  # lost, or not yet on the replica of the stream that was asked
                tries -= 1
                await asyncio.sleep(_PAUSE_S if tries else 0)
        body = b"".join(pieces[i] for i in sorted(pieces))
        if len(body) != ref.size or _hash(body) != ref.hash:
            raise BlobLost(
                f"the body of number {subjects.seq_token(seq_id)} of model {model_id!r} had {ref.size} bytes with hash "
                f"{ref.hash}; {len(body)} bytes in {len(pieces)} of {ref.pieces} pieces are there"
            )
        return body

    async def drop(self, model_id: str, seq_id: int | None, ref: BlobRef) -> None:
        """Remove one body; again is the same. Raises BrokerUnreachable."""
        pattern = subjects.blob(self._group, model_id, seq_id, str(ref), None)
        await scan.purge(self._bus, subjects.BLOB_STREAM, pattern)

    async def drop_model(self, model_id: str) -> None:
        """Remove every body of a model; again is the same. Raises BrokerUnreachable."""
        await scan.purge(self._bus, subjects.BLOB_STREAM, subjects.blobs(self._group, model_id))

    async def models(self) -> set[str]:
        """The models that have any. Raises BrokerUnreachable."""
        found = await scan.subjects_of(self._bus, subjects.BLOB_STREAM, subjects.blobs(self._group, None))
        return {subjects.unescape(subject.split(".")[4]) for subject in found}


def _hash(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()
