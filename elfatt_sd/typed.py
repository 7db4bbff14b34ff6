"""Plain data checked against types: what files of TOML and JSON hold, and one line that says what is wrong.

The types are dataclasses, which accept no other keys, and `msgspec.Struct`s, which ignore them. A field may carry a
range: `Annotated[int, msgspec.Meta(ge=1)]`.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from elfatt_sd.errors import ElfattError
from elfatt_sd.files import read_plain

Shape = TypeVar("Shape")
_KINDS = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}
_RANGES = {">=": "of at least", "<=": "of at most", ">": "above", "<": "below"}
_LONGEST = 120  # characters of a value that a message repeats


def refused(what: str, accepted: str) -> ElfattError:
    return ElfattError(f"{what} is not accepted; accepted: {accepted}.")


def known_keys(prefix: str, data: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse a table with another key."""
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise ElfattError(f"key {prefix + unknown[0]!r} is not known; accepted: {', '.join(known)}.")


def checked(data: Any, shape: type[Shape]) -> Shape:
    """Build a value of a type from plain data; lists become tuples where the type says so."""
    for place, table, fields in _tables(data, shape):
        known_keys(f"{place}." if place else "", table, fields)
    try:
        return msgspec.convert(data, shape)
    except UnicodeEncodeError as error:
        raise refused(ascii(error.object), "text in UTF-8") from error
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ElfattError):  # of a `__post_init__`
            raise error.__cause__ from error
        raise _explained(str(error), data, shape) from error


def parse_json(content: bytes) -> Any:
    """Return what JSON holds, strictly: no NaN, no infinity, no number beyond float, no half of a surrogate pair."""
    try:
        return msgspec.json.decode(content)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_json(path: Path, remedy: str) -> Any:
    """Return the content of a JSON file, None where there is no file; see `parse_json`."""
    try:
        data = parse_json(read_plain(path))
        if data is None:
            raise ValueError("it holds nothing, null")
        return data
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ElfattError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ElfattError(f"{path} is damaged ({error}); {remedy}.") from error


def read_typed(path: Path, shape: type[Shape], remedy: str) -> Shape | None:
    """Return what a JSON file holds as a value of a type, None where there is no file."""
    data = read_json(path, remedy)
    return None if data is None else check_file(path, data, shape, remedy)


def check_file(path: Path | str, data: Any, shape: type[Shape], remedy: str) -> Shape:
    """Check what was read from a file."""
    try:
        return checked(data, shape)
    except ElfattError as error:
        raise ElfattError(f"{path}: {str(error).removesuffix('.')}; {remedy}.") from error


def _tables(data: Any, hint: Any, place: str = "") -> Iterator[tuple[str, Mapping[str, Any], Collection[str]]]:
    hint = _bare(hint)
    if dataclasses.is_dataclass(hint) and isinstance(data, Mapping):
        hints = _fields(hint)
        yield place, data, hints
        for name, value in data.items():
            yield from _tables(value, hints.get(name, Any), f"{place}.{name}" if place else name)
    elif typing.get_origin(hint) is tuple and isinstance(data, list | tuple):
        for index, value in enumerate(data):
            yield from _tables(value, typing.get_args(hint)[0], f"{place}[{index}]")


def _bare(hint: Any) -> Any:
    if typing.get_origin(hint) is typing.Annotated:
        return _bare(typing.get_args(hint)[0])
    if isinstance(hint, types.UnionType):
        return _bare(next(part for part in typing.get_args(hint) if part is not type(None)))
    return hint


def _fields(hint: Any) -> dict[str, Any]:
    return typing.get_type_hints(hint, include_extras=True)


def _explained(message: str, data: Any, shape: Any) -> ElfattError:
    """Say in the words of this package what msgspec found."""
    found, _, place = message.partition(" - at `$")
    name = place.rstrip("`").removeprefix(".")
    if missing := re.fullmatch(r"Object missing required field `(.*)`", found):
        return ElfattError(f"key {'.'.join(filter(None, [name, missing[1]]))!r} is missing; it is required.")
    hint, keys = shape, []
    for key in re.findall(r"\.\.\.|[^.\[\]]+", name):
        hint = _inner(_bare(hint), key)
        key = _wrong_key(data, hint) if key == "..." else int(key) if isinstance(data, list | tuple) else key
        data = data[key]
        keys.append(f"[{key}]" if isinstance(key, int) else f".{key}")
    value = repr(data)
    value = value if len(value) <= _LONGEST else f"{value[:_LONGEST]}..."
    return refused(f"{''.join(keys).removeprefix('.') or 'the content'}={value}", _accepted(found, _bare(hint)))


def _wrong_key(data: Mapping[str, Any], hint: Any) -> str:
    for key, value in data.items():
        try:
            msgspec.convert(value, hint)
        except msgspec.ValidationError:
            return key
    return ""


def _inner(hint: Any, key: str) -> Any:
    if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or issubclass(hint, msgspec.Struct)):
        return _fields(hint)[key]
    return (*typing.get_args(hint), Any)[1 if typing.get_origin(hint) is dict else 0]


def _accepted(found: str, hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(map(str, typing.get_args(hint)))
    wanted = re.match(r"Expected `(\w+)[^`]*`(?: (?:of length )?(>=|<=|<|>) (\S+))?(?:, got .*)?(.*)", found)
    if wanted is None:
        return found
    kind = _KINDS.get(wanted[1], wanted[1])
    return " ".join(filter(None, [kind, _RANGES.get(wanted[2]), wanted[3], wanted[4].strip()]))
