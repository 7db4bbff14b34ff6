"""What the files of a run hold that are read back. Keys of later versions are ignored."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from elfatt_sd.errors import ElfattError
from elfatt_sd.typed import check_file, read_json

Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Index = Annotated[int, Meta(ge=0)]


class Environment(Struct, frozen=True):
    """Of the machine and the versions, what is looked up by name."""

    packages: dict[str, str] = {}
    cuda: dict[str, Any] | None = None


class RunRecord(Struct, frozen=True):
    """`run.json`: whose run a folder is."""

    format: Literal[1]
    identity: str
    created: str
    protocol: dict[str, Any]
    environment: dict[str, Any]


class MadeImage(Struct, frozen=True):
    """A line of a manifest: an image as it was made."""

    index: Index
    file: str
    prompt: str
    class_index: Index
    seed: int
    sha256: Sha256


class Failure(Struct, frozen=True):
    """`failed.json`: why a row has no images."""

    reason: str


class Scores(Struct, frozen=True):
    """`scores.json`."""

    format: int
    identity: str
    references: dict[str, dict[str, Any]]
    rows: dict[str, dict[str, Any]]


class Measured(Struct, frozen=True):
    """`time.json` and `memory.json`."""

    identity: str
    environment: dict[str, Any]
    rows: dict[str, dict[str, Any]]
    errors: dict[str, str] = {}


class Cost(Struct, frozen=True):
    """`cost.json`."""

    identity: str
    rows: dict[str, dict[str, Any]]


def read_data(path: Path, shape: type[Any], remedy: str) -> dict[str, Any] | None:
    """Return the plain data of a file that holds a record, None where there is no file.

    Raises:
        ElfattError: it is damaged; the message names the file and the field.
    """
    data = read_json(path, remedy)
    if data is not None:
        check_file(path, data, shape, remedy)
    return data if isinstance(data, Mapping) else None  # type: ignore[return-value]


def is_whole(path: Path, shape: type[Any]) -> bool:
    """Tell whether a file is there and holds a record."""
    try:
        return read_data(path, shape, "") is not None
    except ElfattError:
        return False
