"""Prompts of a run: from class labels and a template, or from a file, each with the class or cluster it belongs to."""

from __future__ import annotations

import csv
import io
import os
import random
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from elfatt_sd.errors import ElfattError
from elfatt_sd.files import read_plain
from elfatt_sd.methods.base import in_one_line

if TYPE_CHECKING:
    from elfatt_sd.evaluation.protocols import Protocol

Value = TypeVar("Value")

# The ILSVRC-2012 classes, facts: WordNet ids and lemmas as timm 1.0.31 lists them, short names as torchvision 0.28.0,
# but for five (264, 517, 638, 639, 836) that two classes share, or that leave open which of two is meant.
IMAGENET_FILE = Path(__file__).with_name("imagenet1k_classes.csv")
# The lists in the package, by name.
PROMPT_LISTS = {name: Path(__file__).with_name("prompt_lists") / f"{name}.csv" for name in ("images", "clips")}
_USUAL = ("prompt", "prompts", "caption", "text")  # columns, whatever their case
_TABLES = {".csv": ",", ".tsv": "\t"}


@dataclass(frozen=True)
class Prompt:
    index: int  # in the run: one latent each
    class_index: int  # of its label or cluster
    text: str


@dataclass(frozen=True)
class PromptFile:
    # `.csv` or `.tsv` with a header; any other file with one prompt a line; or the name of a list in the package
    file: str
    column: str = ""  # that holds the prompts of a table; empty takes `prompt`, `prompts`, `caption` or `text`
    # column that says which prompts belong together. Intervals are over clusters: images of one cluster may depend on
    # each other. Empty makes each different prompt a cluster of its own; capitals, spaces and forms of one character
    # make no difference.
    cluster: str = ""


def run_prompts(protocol: Protocol) -> list[Prompt]:
    """Return the prompts of each row's images, in the order of their indices."""
    if protocol.prompts is not None:
        texts = spread(read_prompts(protocol.prompts), protocol.classes)
    else:
        labels, template = spread([*enumerate(load_labels(protocol.labels))], protocol.classes), protocol.template
        with in_one_line(f"template={template!r} is not accepted; accepted: the field {{label}}"):
            texts = [(index, template.format(label=label)) for index, label in labels]
    chosen = spread([pair for pair in texts for _ in range(protocol.images_per_class)], protocol.limit)
    return [Prompt(index, number, text) for index, (number, text) in enumerate(chosen)]


def spread(values: Sequence[Value], count: int) -> list[Value]:
    """Return so many of the values, in order: one drawn from each of `count` equal stretches, always the same.

    The draw keeps the choice from falling in step with lists that repeat, such as combinations of attributes. 0, or
    more than there are, returns all values.
    """
    if not 0 < count < len(values):
        return list(values)
    draw = random.Random(0).random
    return [values[int((index + draw()) * len(values) / count)] for index in range(count)]


def load_labels(name: str) -> list[str]:
    """Return a named list (`imagenet1k`, `toy`), or the labels of a file: one per line, or a column `name`."""
    if name == "toy":
        from elfatt_sd.toy.renderer import CLASS_PROMPTS

        return list(CLASS_PROMPTS)
    if name != "imagenet1k" and not os.path.isfile(name):  # which takes any name
        raise ElfattError(f"labels={name!r} is not known; accepted: imagenet1k, toy, or a .txt or .csv file.")
    path, column = (IMAGENET_FILE, "short_name") if name == "imagenet1k" else (Path(name), "name")
    labels = [_value(place, row, column) for place, row in _rows(path, "labels", column)]
    label, times = Counter(labels).most_common(1)[0]
    if times > 1:
        raise ElfattError(f"labels {name} names {label!r} twice; every label must be distinct.")
    return labels


def read_prompts(source: PromptFile) -> list[tuple[int, str]]:
    """Read all prompts of a file, in its order and without blank lines, each after the number of its cluster."""
    path = PROMPT_LISTS.get(source.file, Path(source.file))
    if path.suffix.lower() in (".jsonl", ".ndjson", ".json"):
        raise ElfattError(f"prompts {path} is JSON, which is not read; give a text file, .csv or .tsv.")
    rows = _rows(path, "prompts", "prompt")
    usual = [name for known in _USUAL for name in rows[0][1] if name.strip().lower() == known]
    column = source.column or (usual or _USUAL)[0]
    numbers: dict[str, int] = {}
    found = []
    for place, row in rows:
        prompt = _value(place, row, column)
        alike = " ".join(unicodedata.normalize("NFKC", prompt).casefold().split())
        cluster = _value(place, row, source.cluster) if source.cluster else alike
        found.append((numbers.setdefault(cluster, len(numbers)), prompt))
    return found


def texts_of(file: Path | None) -> list[str]:
    return [] if file is None else [text for _, text in read_prompts(PromptFile(str(file)))]


def _value(place: str, row: Mapping[str, Any], column: str) -> str:
    if column not in row:
        raise ElfattError(f"{place} has no column {column!r}, but {', '.join(row)}; give one of these.")
    value = (row[column] or "").strip()  # None where the row is too short
    if not value:
        raise ElfattError(f"{place} has nothing in column {column!r}; give a text.")
    return str(value)


def _rows(path: Path, what: str, column: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the place and the fields of each row of a table with a header; of another file, each line's one field."""
    remedy = "give a text file, .csv or .tsv in UTF-8, or the name of a list"
    with in_one_line(f"{what} {path} cannot be read; {remedy}"):
        text = read_plain(path).decode("utf-8-sig")
        if "\0" in text:  # UTF-16 of plain letters is UTF-8 too, of other prompts
            raise ValueError("it holds NUL, as UTF-16 does")
    delimiter = _TABLES.get(path.suffix.lower())
    rows: list[tuple[str, dict[str, Any]]] = []
    if delimiter is None:
        rows = [(str(path), {column: line}) for line in text.split("\n") if line.strip()]
    else:
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        try:
            for row in reader:
                rows.append((f"{path}, line {reader.line_num}", row))
                if None in row:  # the rest of a prompt would be lost
                    raise ElfattError(f"{rows[-1][0]} has more fields than the header; put commas in quotes.")
        except csv.Error as error:
            raise ElfattError(f"{path}, line {reader.line_num} is damaged ({error}); mend the line.") from error
    if not rows:
        raise ElfattError(f"{what} {path} is empty; give one a line.")
    return rows
