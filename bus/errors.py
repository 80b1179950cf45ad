"""What can be wrong with a message, apart from who carried it."""

from __future__ import annotations


class CodecError(ValueError):
    """A body that cannot be understood. `str()` says what was wrong and what would be right."""

    def __init__(self, message: str, field: str | None = None, *, seq_id: int | None = None) -> None:
        super().__init__(message)
        self.field = field
        """The offending field as a path, `data[3].loss_fn_inputs.weights`; None where the body as a whole is bad."""
        self.seq_id = seq_id
        """The number the message claims, where it could still be read: a refused request uses up its number."""


class NewerFormat(CodecError):
    """Written by a newer tinkerbus than this one."""


def newer_format(found: int, known: int, seq_id: int | None = None) -> NewerFormat:
    return NewerFormat(
        f"format {found} is newer than this reader, which knows up to format {known}: update tinkerbus",
        "format",
        seq_id=seq_id,
    )
