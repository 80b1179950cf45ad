"""What a replay says of published results: the same, or which fields differ and by how much. Pure."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from bus.events import Event, Outcome, Tensor
from bus.tensors import unpack
from runtime.log_summary import type_of

Verdict: TypeAlias = Literal["same", "differs", "expired", "unanswered", "not_run", "not_reached"]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One field of a result that comes out differently."""

    field: str
    """As a path: `metrics.loss:sum`, `loss_fn_outputs[0].logprobs`."""
    published: str
    replayed: str
    by: float | None = None
    """The largest absolute difference of its numbers; None where it has none, or they cannot be subtracted."""
    values: int = 1
    """How many numbers of a tensor differ."""


class Checked(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="operation"):
    """One operation that was run again, or could not be."""

    model_id: str
    seq_id: int | None
    """None for `unload_model`."""
    verb: str
    verdict: Verdict
    """"expired": it was answered, and the result is no longer kept. "unanswered": there is no result yet. "not_run":
    it would have written a checkpoint. "not_reached": its turn did not come, see `because`."""
    differences: tuple[Difference, ...] = ()
    because: str | None = None


class Tally(msgspec.Struct, kw_only=True, tag_field="kind", tag="model"):
    """What was found of one model."""

    model_id: str
    begins: str
    """Where its replay began: "creation", or a snapshot by the number that comes next."""
    same: int = 0
    differs: int = 0
    expired: int = 0
    unanswered: int = 0
    not_run: int = 0
    not_reached: int = 0

    def add(self, checked: Checked) -> None:
        setattr(self, checked.verdict, getattr(self, checked.verdict) + 1)


def differences(published: Outcome, replayed: Outcome) -> tuple[Difference, ...]:
    """Every field in which the two do not have the same bits; empty where the replay came to what was published."""
    if type(published) is not type(replayed):
        return (Difference(field="type", published=_kind(published), replayed=_kind(replayed)),)
    return tuple(_fields("", published, replayed))


def in_words(difference: Difference) -> str:
    """`metrics.loss:sum by 1.2e-07 (4.5 → 4.5000001)`"""
    by = "" if difference.by is None else f" by {difference.by:.3g}"
    many = "" if difference.values == 1 else f" in {difference.values} values"
    return f"{difference.field}{by}{many} ({difference.published} → {difference.replayed})"


def _fields(path: str, published: Event, replayed: Event) -> Iterator[Difference]:
    for name in published.__struct_fields__:
        inner = f"{path}.{name}" if path else name
        yield from _differing(inner, getattr(published, name), getattr(replayed, name))


def _differing(path: str, published: Any, replayed: Any) -> Iterator[Difference]:
    if type(published) is not type(replayed):
        yield _plain(path, published, replayed)
    elif isinstance(published, Tensor):
        yield from _tensors(path, published, replayed)
    elif isinstance(published, Event):
        yield from _fields(path, published, replayed)
    elif isinstance(published, Mapping):
        for name in sorted(published.keys() | replayed.keys()):
            yield from _differing(f"{path}.{name}", published.get(name), replayed.get(name))
    elif isinstance(published, tuple):
        if len(published) != len(replayed):
            yield _plain(f"{path}.length", len(published), len(replayed))
        for i, pair in enumerate(zip(published, replayed, strict=False)):
            yield from _differing(f"{path}[{i}]", *pair)
    elif isinstance(published, float):
        if struct.pack("<d", published) != struct.pack("<d", replayed):
            yield _plain(path, published, replayed, by=_distance(published, replayed))
    elif published != replayed:
        yield _plain(path, published, replayed)


def _tensors(path: str, published: Tensor, replayed: Tensor) -> Iterator[Difference]:
    if (published.dtype, published.shape) != (replayed.dtype, replayed.shape):
        yield _plain(path, f"{published.dtype} {published.shape}", f"{replayed.dtype} {replayed.shape}")
    elif published.data != replayed.data:
        pairs = [
            (a, b)
            for a, b in zip(unpack(published), unpack(replayed), strict=True)
            if struct.pack("<d", a) != struct.pack("<d", b)
        ]
        distances = [_distance(a, b) for a, b in pairs]
        known = [distance for distance in distances if distance is not None]
        a, b = pairs[distances.index(max(known))] if known else pairs[0]
        yield _plain(path, a, b, by=max(known, default=None), values=len(pairs))


def _distance(a: float, b: float) -> float | None:
    distance = abs(a - b)
    return distance if math.isfinite(distance) else None


def _plain(path: str, published: object, replayed: object, **more: Any) -> Difference:
    return Difference(field=path, published=str(published), replayed=str(replayed), **more)


def _kind(outcome: Outcome) -> str:
    error = getattr(outcome, "error", None)
    return type_of(outcome) if error is None else f"{type_of(outcome)}: {error}"
