"""What can be wrong: with a message, and with the broker that carries it."""

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


class BrokerError(Exception):
    """Something about the broker is not as it must be. `str()` is one line made for its operator."""


class BrokerUnreachable(BrokerError):
    """Nothing answers there, or not in time. Trying again later may help."""


class BrokerTooOld(BrokerError):
    pass


class NoJetStream(BrokerError):
    pass


class WrongCredentials(BrokerError):
    pass


class NotAllowed(BrokerError):
    """The broker knows these credentials and does not let them do this."""


class MessageTooLarge(BrokerError):
    """The message is above the broker's `max_payload`; nothing was sent."""
