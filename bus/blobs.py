"""Claim check: bodies that the broker cannot carry in one message, in pieces on subjects of their own.

What travels instead is a reference: hash, size, and the length of a piece. A piece's subject is made of what the body
belongs to and the reference, so that writing it again changes nothing, and two bodies of one operation do not mix.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass

from bus import scan
from bus.connection import HEADER_ROOM, BrokerError, Bus
from bus.publish import SubjectTaken, store

TB_BLOB = "Tb-Blob"
"""The header that carries the reference, of a message without a body."""
PIECE_BYTES = 2**20
"""At most; a broker's `max_payload` may ask for less."""

_TIMEOUT_S = 10.0
_TRIES, _PAUSE_S = 5, 0.1


class BlobLost(BrokerError):
    """The body is not there any more, or not whole."""


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


def reference(bus: Bus, body: bytes) -> BlobRef | None:
    """What has to stand for this body, or None where it fits into a message."""
    most = bus.max_payload - HEADER_ROOM
    if len(body) <= most:
        return None
    return BlobRef(_hash(body), len(body), min(most, PIECE_BYTES))


async def put(bus: Bus, prefix: str, ref: BlobRef, body: bytes, *, doing: str) -> None:
    """Store the body on `<prefix>.<ref>.<number of the piece>`. Raises StreamFull, BrokerUnreachable.

    What is there then may be written again, or dropped.
    """
    view = memoryview(body)
    for i in range(ref.pieces):
        piece = bytes(view[i * ref.piece : (i + 1) * ref.piece])
        try:
            await store(
                bus, f"{prefix}.{ref}.{i}", piece, {}, doing=doing, expected_revision=0, timeout_s=_TIMEOUT_S
            )
        except SubjectTaken:
            continue  # the same piece: its subject names what it holds


async def get(bus: Bus, stream: str, prefix: str, ref: BlobRef, *, what: str) -> bytes:
    """The body, compared with its hash. Raises BlobLost, BrokerUnreachable."""
    pieces: list[bytes] = []
    for i in range(ref.pieces):
        found = await scan.last_of(bus, stream, f"{prefix}.{ref}.{i}")
        for _ in range(_TRIES):  # it may not be on the replica of the stream that was asked
            if found is not None:
                break
            await asyncio.sleep(_PAUSE_S)
            found = await scan.last_of(bus, stream, f"{prefix}.{ref}.{i}")
        if found is None:
            raise BlobLost(
                f"{what} had {ref.size} bytes; piece {i + 1} of {ref.pieces} is not there any more"
            )
        pieces.append(found.data)
    body = b"".join(pieces)
    if len(body) != ref.size or _hash(body) != ref.hash:
        raise BlobLost(
            f"{what} had {ref.size} bytes with hash {ref.hash}; what is there has hash {_hash(body)}"
        )
    return body


async def drop(bus: Bus, stream: str, prefix: str, ref: BlobRef) -> None:
    """Remove one body; again is the same. Raises BrokerUnreachable."""
    await scan.purge(bus, stream, f"{prefix}.{ref}.*")


def _hash(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()
