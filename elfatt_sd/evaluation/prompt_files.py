"""Prompts from a file: one a line, or a table (CSV or TSV), each with the cluster that it belongs to."""

from __future__ import annotations

import csv
import io
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elfatt_sd.errors import ElfattError

# The lists in the package, by name.
PROMPT_LISTS = {name: Path(__file__).with_name("prompt_lists") / f"{name}.csv" for name in ("images", "clips")}
_USUAL = ("prompt", "prompts", "caption", "text")  # columns, whatever their case
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_JSON = (".jsonl", ".ndjson", ".json")
_SHOWN = 40  # characters of a value that a message repeats


@dataclass(frozen=True)
class PromptFile:
    # `.csv` or `.tsv` with a header; any other file with one prompt a line; or the name of a list in the package
    file: str
    column: str = ""  # that holds the prompts of a table; empty takes `prompt`, `prompts`, `caption` or `text`
    # column that says which prompts belong together. Intervals are over clusters: images of one cluster may depend on
    # each other. Empty makes each different prompt a cluster of its own; capitals, spaces and forms of one character
    # make no difference.
    cluster: str = ""

    @property
    def path(self) -> Path:
        return PROMPT_LISTS.get(self.file, Path(self.file))


@dataclass(frozen=True)
class FilePrompt:
    """A prompt of a file, and the number of its cluster, from 0 in the order of the file."""

    text: str
    cluster: int


def read_prompts(source: PromptFile) -> list[FilePrompt]:
    """Read all prompts of a file, in its order; blank lines are left out."""
    path = source.path
    text = _content(path, source.file)
    pairs = list(_pairs(path, text, source))
    if not pairs:
        raise ElfattError(f"prompts {path} has no prompt; give one a line.")
    numbers: dict[str, int] = {}
    return [FilePrompt(prompt, numbers.setdefault(cluster, len(numbers))) for prompt, cluster in pairs]


def _content(path: Path, given: str) -> str:
    if not path.is_file():
        known = ", ".join(PROMPT_LISTS)
        raise ElfattError(f"prompts.file={given!r} is not a file; give a text file, .csv, .tsv, or one of: {known}.")
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ElfattError(f"prompts {path} cannot be read ({error}); give a file in UTF-8.") from error


def _pairs(path: Path, text: str, source: PromptFile) -> Iterator[tuple[str, str]]:
    kind = path.suffix.lower()
    if kind in _DELIMITERS:
        rows = table_rows(path, text, _DELIMITERS[kind])
    elif kind in _JSON:
        raise ElfattError(f"prompts {path} is JSON, which is not read; give a text file, .csv or .tsv.")
    else:
        for name, value in (("column", source.column), ("cluster", source.cluster)):
            if value:
                raise ElfattError(f"prompts.{name}={value!r} needs a table; {path} is none: give .csv or .tsv.")
        lines = enumerate(text.split("\n"), 1)  # a prompt may hold other marks that end lines
        rows = ((f"{path}, line {number}", {"prompt": line}) for number, line in lines if line.strip())
    for place, row in rows:
        prompt = _value(place, row, _column(place, row, source.column))
        likeness = " ".join(unicodedata.normalize("NFKC", prompt).casefold().split())
        yield prompt, _value(place, row, source.cluster) if source.cluster else likeness


def table_rows(path: Path, text: str, delimiter: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the place and the fields of each row of a table with a header."""
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        columns = reader.fieldnames or []
        twice = next((name for name in columns if columns.count(name) > 1), None)
        if twice is not None:
            raise ElfattError(f"{path} has two columns {twice!r}; give each its own name.")
        for row in reader:
            if None in row:
                raise ElfattError(
                    f"{path}, line {reader.line_num} has more fields than the header; put commas in quotes."
                )
            yield f"{path}, line {reader.line_num}", row
    except csv.Error as error:
        raise ElfattError(f"{path}, line {reader.line_num} is damaged ({error}); mend the line.") from error


def _column(place: str, row: Mapping[str, Any], wanted: str) -> str:
    if wanted:
        return wanted
    found = next((name for usual in _USUAL for name in row if name.strip().lower() == usual), None)
    if found is None:
        raise ElfattError(f"{place} has {_named(row)}; say with prompts.column which holds the prompts.")
    return found


def _value(place: str, row: Mapping[str, Any], column: str) -> str:
    if column not in row:
        raise ElfattError(f"{place} has no column {column!r}, but {_named(row)}; give one of these.")
    value = row[column]
    if value is None or not value.strip():  # None where the row is too short
        raise ElfattError(f"{place} has {str(value)[:_SHOWN]!r} in column {column!r}; give a text.")
    if "\0" in value:
        raise ElfattError(f"{place} has a character in column {column!r} that is not text (NUL).")
    return str(value).strip()


def _named(row: Mapping[str, Any]) -> str:
    return f"the columns {', '.join(map(repr, row))}" if row else "no columns"
