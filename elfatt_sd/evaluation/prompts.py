"""Prompts of a run: from class labels and a template, or from a file, each with the class or cluster it belongs to."""

from __future__ import annotations

import csv
import io
import itertools
import os
import random
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from elfatt_sd.errors import ElfattError
from elfatt_sd.files import refused

if TYPE_CHECKING:
    from elfatt_sd.evaluation.protocols import Protocol

Value = TypeVar("Value")
MOST_IMAGES = 10_000_000  # of a row: their prompts are held in memory

# The ILSVRC-2012 classes, facts: WordNet ids and lemmas as timm 1.0.31 lists them, short names as torchvision 0.28.0,
# but for five (264, 517, 638, 639, 836) that two classes share, or that leave open which of two is meant.
IMAGENET_FILE = Path(__file__).with_name("imagenet1k_classes.csv")
# The lists in the package, by name.
PROMPT_LISTS = {name: Path(__file__).with_name("prompt_lists") / f"{name}.csv" for name in ("images", "clips")}
_USUAL = ("prompt", "prompts", "caption", "text")  # columns, whatever their case
_TABLES = {".csv": ",", ".tsv": "\t"}


@dataclass(frozen=True)
class Label:
    index: int  # in its list
    wnid: str  # its WordNet id; empty outside ImageNet
    name: str  # in prompts


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

    @property
    def path(self) -> Path:
        return PROMPT_LISTS.get(self.file, Path(self.file))


def run_prompts(protocol: Protocol) -> list[Prompt]:
    """Return the prompts of each row's images, in the order of their indices."""
    each = protocol.images_per_class
    if protocol.prompts is not None:
        texts = spread(read_prompts(protocol.prompts), protocol.classes)
    else:
        texts = label_texts(spread(load_labels(protocol.labels), protocol.classes), protocol.template)
    if len(texts) * each > MOST_IMAGES:
        what = f"images_per_class={each} with {len(texts)} labels or prompts"
        raise refused(what, f"{MOST_IMAGES} images a row at most")
    chosen = spread([pair for pair in texts for _ in range(each)], protocol.limit)
    offsets = sorted([0, *(cell.seed_offset for cell in protocol.cells if cell.role == "null")])
    for first, second in itertools.pairwise(offsets):
        if second - first < len(chosen):
            raise ElfattError(
                f"seed_offset={second} is not accepted; with {len(chosen)} images a row, give null rows offsets that "
                f"are {len(chosen)} or more above 0 and above each other."
            )
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


def label_texts(labels: Sequence[Label], template: str) -> list[tuple[int, str]]:
    """Return the index and the prompt of each label."""

    def text(name: str, wnid: str = "", index: int = 0) -> str:
        article = "an" if name[:1].lower() in set("aeiou") else "a"
        return template.format(label=name, wnid=wnid, index=index, article=article)

    try:
        one, other = text("x"), text("y")
        texts = [(label.index, text(label.name, label.wnid, label.index)) for label in labels]
    except (LookupError, ValueError, AttributeError) as error:
        fields = "the fields {label}, {wnid}, {index}, {article}"
        raise refused(f"template={template!r} ({type(error).__name__}: {error})", fields) from error
    if one == other:
        raise ElfattError(f"template={template!r} has no field {{label}}; give one.")
    return texts


def load_labels(name: str) -> list[Label]:
    """Return a named list (`imagenet1k`, `toy`), or read a file."""
    if name == "imagenet1k":
        rows = csv.DictReader(io.StringIO(IMAGENET_FILE.read_text(encoding="utf-8")))
        return [Label(int(row["index"]), row["wnid"], row["short_name"]) for row in rows]
    if name == "toy":
        from elfatt_sd.toy.renderer import CLASS_PROMPTS

        return [Label(index, "", text) for index, text in enumerate(CLASS_PROMPTS)]
    if not os.path.isfile(name):  # which takes any name
        raise ElfattError(f"labels={name!r} is not known; accepted: imagenet1k, toy, or a .txt or .csv file.")
    return read_labels(Path(name))


def read_labels(path: Path) -> list[Label]:
    """Read labels from a text file (one per line) or a `.csv` with a column `name` (or `label`), optionally `wnid`."""
    rows = [row for _, row in _rows(path, "labels", "name")]
    column = "name" if not rows or "name" in rows[0] else "label"
    if rows and column not in rows[0]:
        raise ElfattError(f"labels {path} has columns {', '.join(rows[0])}; accepted are name or label, and wnid.")
    labels: dict[str, Label] = {}
    for row in rows:
        name = (row[column] or "").strip()
        if name in labels:
            raise ElfattError(f"labels {path} names {name!r} twice; every label must be distinct.")
        if name:
            labels[name] = Label(len(labels), (row.get("wnid") or "").strip(), name)
    if not labels:
        raise ElfattError(f"labels {path} is empty; give one label per line.")
    return list(labels.values())


def read_prompts(source: PromptFile) -> list[tuple[int, str]]:
    """Read all prompts of a file, in its order and without blank lines, each after the number of its cluster."""
    path = source.path
    if not path.is_file():
        known = ", ".join(PROMPT_LISTS)
        raise ElfattError(
            f"prompts.file={source.file!r} is not a file; give a text file, .csv, .tsv, or one of: {known}."
        )
    kind = path.suffix.lower()
    if kind in (".jsonl", ".ndjson", ".json"):
        raise ElfattError(f"prompts {path} is JSON, which is not read; give a text file, .csv or .tsv.")
    if kind not in _TABLES and (source.column or source.cluster):
        raise ElfattError(f"prompts.column and prompts.cluster need a table; {path} is none: give .csv or .tsv.")
    rows = _rows(path, "prompts", "prompt")
    if not rows:
        raise ElfattError(f"prompts {path} has no prompt; give one a line.")
    usual = [name for known in _USUAL for name in rows[0][1] if name.strip().lower() == known]
    if not (source.column or usual):
        columns = ", ".join(rows[0][1])
        raise ElfattError(f"prompts {path} has the columns {columns}; say with prompts.column which holds the prompts.")
    numbers: dict[str, int] = {}
    found = []
    for place, row in rows:
        prompt = _value(place, row, source.column or usual[0])
        alike = " ".join(unicodedata.normalize("NFKC", prompt).casefold().split())
        cluster = _value(place, row, source.cluster) if source.cluster else alike
        found.append((numbers.setdefault(cluster, len(numbers)), prompt))
    return found


def _value(place: str, row: Mapping[str, Any], column: str) -> str:
    if column not in row:
        raise ElfattError(f"{place} has no column {column!r}, but {', '.join(row)}; give one of these.")
    value = (row[column] or "").strip()  # None where the row is too short
    if not value:
        raise ElfattError(f"{place} has nothing in column {column!r}; give a text.")
    return str(value)


def _rows(path: Path, what: str, column: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the place and the fields of each row of a table with a header; of another file, each line's one field."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
        if "\0" in text:  # UTF-16 of plain letters is UTF-8 too, of other prompts
            raise ValueError("it holds NUL, as UTF-16 does")
    except (OSError, ValueError) as error:
        raise ElfattError(f"{what} {path} cannot be read ({error}); give a file in UTF-8.") from error
    delimiter = _TABLES.get(path.suffix.lower())
    if delimiter is None:
        return [("", {column: line}) for line in text.split("\n") if line.strip()]
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows: list[tuple[str, dict[str, Any]]] = []
    try:
        for row in reader:
            rows.append((f"{path}, line {reader.line_num}", row))
            if None in row:  # the rest of a prompt would be lost
                raise ElfattError(f"{rows[-1][0]} has more fields than the header; put commas in quotes.")
    except csv.Error as error:
        raise ElfattError(f"{path}, line {reader.line_num} is damaged ({error}); mend the line.") from error
    return rows
