"""What a gate finds: single figures against their bars, and the one verdict they add up to. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

TINY = 1e-6


class Level(StrEnum):
    """How well a property holds; the worst figure of a gate decides."""

    BITWISE = "bitwise"
    TINY = "within 1e-6"
    BAR = "within the bar"
    FAILS = "fails"
    UNSUPPORTED = "not supported"
    """The server refused the feature by name. Not a failure."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One line of the table."""

    level: Level
    figure: float | None
    """The figure that comes closest to its bar; None where nothing was measured."""
    bar: float | None
    note: str


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured difference."""

    what: str
    value: float
    bar: float
    same_bits: bool

    @property
    def level(self) -> Level:
        if self.same_bits:
            return Level.BITWISE
        if not self.value <= self.bar:  # NaN is within nothing
            return Level.FAILS
        return Level.TINY if self.value <= TINY else Level.BAR

    @property
    def strain(self) -> float:
        """The part of its bar that the figure takes up."""
        return math.inf if math.isnan(self.value) else self.value / self.bar

    def __str__(self) -> str:
        return f"{self.what} {'=' if self.same_bits else f'{self.value:.1e}'}"


_RISING = (Level.BITWISE, Level.TINY, Level.BAR, Level.FAILS)


@dataclass(slots=True)
class Findings:
    """A gate's figures, and what has to be said beside them."""

    loosen: float = 1.0
    """Every bar is multiplied by it: for servers that compute in less than float32."""
    figures: list[Figure] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def measured(self, what: str, value: float, bar: float, *, same_bits: bool | None = None) -> None:
        """A difference that must be within `bar`. `same_bits` defaults to a difference of 0."""
        equal = value == 0.0 if same_bits is None else same_bits
        self.figures.append(Figure(what, value, bar * self.loosen, equal))

    def must(self, holds: bool, otherwise: str) -> None:
        """A condition without a figure; `otherwise` says what is wrong."""
        if not holds:
            self.failures.append(otherwise)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def verdict(self) -> Verdict:
        worst = max(
            self.figures, key=lambda figure: (_RISING.index(figure.level), figure.strain), default=None
        )
        level = Level.FAILS if self.failures or worst is None else worst.level
        said = [*self.failures, ", ".join(map(str, self.figures)), *self.notes]
        return Verdict(
            level=level,
            figure=None if worst is None else worst.value,
            bar=None if worst is None else worst.bar,
            note="; ".join(filter(None, said)),
        )
