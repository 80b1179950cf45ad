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


NOT_SERVED = {
    "stable_reinforce": "it needs records of the sampler that this server does not keep; ",
    "custom": "uploaded loss graphs are not run here; use forward_backward_custom, which computes the loss at the "
    "client, or install a plug-in at the server; ",
}
"""Losses of the Tinker API that this server does not have, and why."""


class UnknownLoss(InputError):
    """No loss of this name is registered."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        first = (
            f"loss {name!r} is not served: {NOT_SERVED[name]}"
            if name in NOT_SERVED
            else f"unknown loss {name!r}; "
        )
        InputError.__init__(self, f"{first}known are {', '.join(known)}", "loss.name")
        self.args = (name, tuple(known))
