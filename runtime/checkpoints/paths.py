"""`tinker://<model_id>/<kind>/<name>`: what a checkpoint is called. Pure.

A path is a key into the table of checkpoints and never one of a file system: where the files are, the row says.
"""

from __future__ import annotations

from typing import NamedTuple, get_args

from bus.subjects import escape
from bus.tables import CheckpointKind

SCHEME = "tinker://"
KINDS: tuple[CheckpointKind, ...] = get_args(CheckpointKind)
MAX_NAME_BYTES = 200
"""Of an escaped name, which is part of a folder's name."""


class CheckpointPath(NamedTuple):
    """One checkpoint's name."""

    model_id: str
    kind: CheckpointKind
    name: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.model_id}/{self.checkpoint_id}"

    @property
    def checkpoint_id(self) -> str:
        """What a REST URL has behind `checkpoints/`."""
        return f"{self.kind}/{self.name}"

    @property
    def key(self) -> tuple[str, str, str]:
        """In the table of checkpoints."""
        return (self.model_id, self.kind, self.name)


def parse(path: str) -> CheckpointPath:
    """Raises ValueError with one sentence for anything that `str` of a CheckpointPath cannot give.

    >>> parse("tinker://run:train:0/weights/step-10").key
    ('run:train:0', 'weights', 'step-10')
    """
    model_id, kind, name = _split(path)
    if not model_id or kind not in KINDS:
        raise ValueError(
            f"path {path!r} is not a checkpoint's: it has the form {SCHEME}MODEL_ID/KIND/NAME, KIND one of "
            f"{', '.join(KINDS)}"
        )
    if wrong := wrong_name(name):
        raise ValueError(f"path {path!r} is not a checkpoint's: {wrong}")
    return CheckpointPath(model_id, kind, name)


def of_checkpoint(model_id: str, checkpoint_id: str) -> CheckpointPath:
    """From a REST URL's parts. Raises ValueError."""
    path = parse(f"{SCHEME}{model_id}/{checkpoint_id}")
    if path.model_id != model_id:
        raise ValueError(f"checkpoint {checkpoint_id!r} is malformed: it has the form KIND/NAME")
    return path


def _split(path: str) -> tuple[str, str, str]:
    parts = path.removeprefix(SCHEME).rsplit("/", 2)
    if not path.startswith(SCHEME) or len(parts) != 3:
        return "", "", ""
    model_id, kind, name = parts
    return model_id, kind, name


def wrong_name(name: str) -> str | None:
    """What is wrong with a checkpoint's name; None for one that will do."""
    if not name or name in (".", ".."):
        return f"name {name!r} names nothing: give it a letter or a digit"
    if "/" in name or not name.isprintable():
        return f"name {name!r} holds a slash or a character that cannot be printed"
    if (size := len(escape(name))) > MAX_NAME_BYTES:
        return (
            f"name {name[:40]!r}… takes {size} bytes once everything but letters, digits, - and _ is escaped; the "
            f"limit is {MAX_NAME_BYTES}"
        )
    return None
