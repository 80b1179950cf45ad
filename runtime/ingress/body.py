"""Request bodies: read up to a limit, decompressed up to a limit, decoded with errors that name the field."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
import zstandard
from fastapi import HTTPException, Request

from bus.errors import CodecError
from runtime.ingress.off_loop import off_loop

T = TypeVar("T")

MAX_JSON_BYTES = 1024 * 1024
"""A JSON body is decoded on the event loop: this much takes a few milliseconds."""
MAX_WINDOW_BYTES = 2**27
"""Largest zstd window (the memory one stream takes): what `zstd --long` makes at most without asking."""
MAX_SEQ_ID = 2**31 - 1
"""The SDK's numbers are int32."""

_SLICE = 1024
_MESSAGE = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>[^`]*)`)?$", re.DOTALL)
_NAMED = re.compile(r"^Object (?P<problem>contains unknown|missing required) field `(?P<name>[^`]+)`$")


async def read_body(request: Request, limit: int) -> bytes:
    """The body, decompressed. 413 past `limit` bytes, 415 for an unknown encoding, 400 for a broken one."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise HTTPException(413, f"the body has more than {limit} bytes, the limit of this endpoint")
        parts.append(part)
    body = b"".join(parts)
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise HTTPException(415, f"Content-Encoding {encoding!r} cannot be read here: send zstd or none")
    return await off_loop(limit, unzstd, body, limit)


def unzstd(body: bytes, limit: int) -> bytes:
    """One zstd frame. Fed in slices, so that no more than `limit` and one slice's worth is ever held."""
    stream = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompressobj()
    parts: list[bytes] = []
    size = 0
    try:
        for at in range(0, len(body), _SLICE):
            parts.append(stream.decompress(body[at : at + _SLICE]))
            size += len(parts[-1])
            if size > limit:
                raise HTTPException(
                    413, f"the body has more than {limit} bytes when decompressed, the limit here"
                )
    except zstandard.ZstdError as error:
        raise HTTPException(400, f"the body is not zstd: {error}") from error
    if not stream.eof or stream.unused_data:
        raise HTTPException(400, "the body is not zstd: one whole frame is wanted")
    return b"".join(parts)


async def read_json(request: Request, limit: int = MAX_JSON_BYTES) -> tuple[bytes, dict[str, Any]]:
    """A JSON object, and its bytes. 400 for anything else."""
    body = await read_body(request, limit)
    try:
        fields = await off_loop(len(body), msgspec.json.decode, body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HTTPException(400, f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise HTTPException(400, f"the body is a JSON {type(fields).__name__}, but has to be an object")
    return body, fields


def convert(fields: Any, kind: type[T]) -> T:
    """Decoded JSON as a request struct. Raises CodecError that names the field."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        found = _MESSAGE.match(str(error))
        what, path = (found["what"], found["path"] or "") if found else (str(error), "")
        if named := _NAMED.match(what):
            path += f".{named['name']}"
            known = named["problem"] == "missing required"
            what = "is missing" if known else "is not a field that this server knows"
        else:
            what = f"is wrong: {what[:1].lower()}{what[1:]}"
        field = path.lstrip(".")
        raise CodecError(f"{field or 'the body'} {what}", field or None) from error


def text_field(fields: dict[str, Any], name: str) -> str:
    """A field that says what the request is about. 400 where it cannot be read."""
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise HTTPException(400, f"{name} is {_shown(value)}, but has to be a text")
    return value


def number_field(fields: dict[str, Any], name: str, least: int, most: int = MAX_SEQ_ID) -> int:
    """A field that says which request this is. 400 where it cannot be read."""
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise HTTPException(
            400, f"{name} is {_shown(value)}, but has to be a whole number from {least} to {most}"
        )
    return value


def _shown(value: Any) -> str:
    return "missing" if value is None else repr(value)[:80]
