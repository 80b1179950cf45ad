"""What a caller can get wrong. Every error names the field, so that it can go back to the user as it is."""

from __future__ import annotations

from collections.abc import Iterable


class InputError(ValueError):
    """A request that cannot be evaluated; `field` is the path of the part that is wrong.

    Paths look like `data[3].loss_fn_inputs.advantages`, `loss.config.beta`, `loss.name`.
    """

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message, field)
        self.message = message
        self.field = field

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


class UnknownLoss(InputError):
    """No loss of this name is registered."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        InputError.__init__(self, f"unknown loss {name!r}; known are {', '.join(known)}", "loss.name")
        self.args = (name, tuple(known))
