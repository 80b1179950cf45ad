"""`tinker://<model_id>/<kind>/<name>`: how checkpoints are called on the wire."""

from __future__ import annotations

from typing import NamedTuple, get_args

from bus.tables import CheckpointKind

SCHEME = "tinker://"
KINDS: tuple[CheckpointKind, ...] = get_args(CheckpointKind)


class TinkerPath(NamedTuple):
    """Also the key of its row. `str()` is the path."""

    model_id: str
    kind: CheckpointKind
    name: str

    @property
    def checkpoint_id(self) -> str:
        """`weights/a`: what follows `checkpoints/` in a URL."""
        return f"{self.kind}/{self.name}"

    def __str__(self) -> str:
        return f"{SCHEME}{self.model_id}/{self.checkpoint_id}"


def parse(text: str) -> TinkerPath:
    """Raises ValueError for what has another form."""
    parts = text.removeprefix(SCHEME).split("/")
    if not text.startswith(SCHEME) or len(parts) != 3 or not all(parts):
        raise ValueError(f"{text!r} is no checkpoint's path: it has the form {SCHEME}RUN/KIND/NAME")
    return TinkerPath(parts[0], _kind(parts[1], text), parts[2])


def of_checkpoint(model_id: str, checkpoint_id: str) -> TinkerPath:
    """From a URL's parts. Raises ValueError."""
    kind, _, name = checkpoint_id.partition("/")
    if not model_id or not name or "/" in name:
        raise ValueError(f"checkpoint {checkpoint_id!r} is malformed: it has the form KIND/NAME")
    return TinkerPath(model_id, _kind(kind, checkpoint_id), name)


def _kind(kind: str, text: str) -> CheckpointKind:
    for known in KINDS:
        if kind == known:
            return known
    raise ValueError(f"{text!r} is of kind {kind!r}, which is none of {', '.join(KINDS)}")
