"""From TOML and environment variables to the settings' structs, with errors that name field, value, limit.

msgspec's own messages leave out the value and, for an unknown key, the keys that exist; so the tables are
walked here and msgspec only judges single values.
"""

from __future__ import annotations

import difflib
import json
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

PREFIX = "TINKERBUS_"

S = TypeVar("S", bound=msgspec.Struct)


class SettingsError(ValueError):
    """The settings cannot be used; one line for the person who wrote them."""


def read_toml(file: Path) -> dict[str, Any]:
    """The file's tables. Raises SettingsError where it is missing or not TOML."""
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise SettingsError(f"config file {file} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"config file {file} is not TOML: {error}") from error


def read_environment(root: type[msgspec.Struct], environment: Mapping[str, str]) -> dict[str, Any]:
    """The tables spelt by the variables that start with TINKERBUS_. Raises SettingsError for a wrong one."""
    out: dict[str, Any] = {}
    for variable, text in sorted(environment.items()):
        if not variable.startswith(PREFIX):
            continue
        table, at = out, root
        tokens = variable.removeprefix(PREFIX).split("__")
        for depth, token in enumerate(tokens):
            key, at = _step(at, token, variable, tokens[:depth])
            if depth < len(tokens) - 1:
                table = table.setdefault(key, {})
            else:
                table[key] = _from_text(variable, text, at)
    return out


def read_struct(cls: type[S], raw: Any, source: str, path: str = "") -> S:
    """`raw` as `cls`. Raises SettingsError for the first key or value that is wrong."""
    if not isinstance(raw, Mapping):
        raise SettingsError(f"{_join(source, path, ': ')} is {raw!r}, but is a table of settings")
    fields = {field.encode_name: field for field in msgspec.structs.fields(cls)}
    for key in raw:
        if key not in fields:
            raise SettingsError(_unknown(f"{source}: {_join(path, key)}", key, list(fields)))
    return cls(
        **{key: _read(fields[key].type, value, source, _join(path, key)) for key, value in raw.items()}
    )


def _read(kind: Any, value: Any, source: str, path: str, *, strict: bool = True) -> Any:
    if _is_struct(kind):
        return read_struct(kind, value, source, path)
    of = _table_of(kind)
    if of is not None and isinstance(value, Mapping):
        return {key: _read(of, item, source, _join(path, key)) for key, item in value.items()}
    try:
        return msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        shown = _join(source, path + where.rstrip("`"), ": ")
        raise SettingsError(f"{shown} is {value!r}: {what[:1].lower()}{what[1:]}") from error


def _step(at: Any, token: str, variable: str, above: list[str]) -> tuple[str, Any]:
    """One token of a variable's name: the key it stands for, and the type found there."""
    if _is_struct(at):
        known = {field.encode_name: field.type for field in msgspec.structs.fields(at)}
        key = token.lower()
        if key not in known:
            spelt = [PREFIX + "__".join([*above, name.upper()]) for name in known]
            raise SettingsError(_unknown(variable, variable, spelt))
        return key, known[key]
    values = _table_of(at)
    if values is None:
        raise SettingsError(f"{variable} is not a setting: {PREFIX}{'__'.join(above)} is a single value")
    return token, values


def _from_text(variable: str, text: str, kind: Any) -> Any:
    """The text as TOML would have given it, checked here so that the error names the variable."""
    if _is_struct(kind) or _table_of(kind) is not None or typing.get_origin(kind) is tuple:
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise SettingsError(f"{variable} is {text!r}: expected JSON ({error})") from error
        _read(kind, value, variable, "")
        return value
    return _read(kind, text, variable, "", strict=False)


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _table_of(kind: Any) -> Any:
    """The value type of `dict[str, X]`, else None."""
    if isinstance(kind, types.GenericAlias) and typing.get_origin(kind) is dict:
        return typing.get_args(kind)[1]
    return None


def _unknown(where: str, name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"{where} is not a setting{hint}; known here: {', '.join(known)}"


def _join(left: str, right: str, mark: str = ".") -> str:
    return mark.join(part for part in (left, right) if part)
