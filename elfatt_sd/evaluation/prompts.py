"""Class labels and the prompts made from them."""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import os
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.prompt_files import PromptFile, read_prompts, table_rows
from elfatt_sd.evaluation.protocols import Protocol

Value = TypeVar("Value")
MOST_IMAGES = 10_000_000  # of a row: their prompts are held in memory

# The ILSVRC-2012 classes, facts: WordNet ids and lemmas as timm 1.0.31 lists them, short names as torchvision 0.28.0.
IMAGENET_FILE = Path(__file__).with_name("imagenet1k_classes.csv")
IMAGENET_SHA256 = "be0d9a0ba89220d80e203c0af2abf12275f35c8973efb4adfdca3085d593b810"
# Names that two classes share in WordNet, or that leave open which of two is meant.
TOLD_APART = {
    264: "Cardigan Welsh corgi",  # 474 is the garment
    517: "construction crane",  # 134 is the crane bird
    638: "maillot swimsuit",
    639: "tank suit maillot",
    836: "sunglass lens",  # 837 is sunglasses
}


@dataclass(frozen=True)
class Label:
    """A class: its index in the list, its WordNet id (empty outside ImageNet) and its name in prompts."""

    index: int
    wnid: str
    name: str


@dataclass(frozen=True)
class Prompt:
    """A prompt: its index in the run (one latent each), the number of its label or cluster, and its text."""

    index: int
    class_index: int
    text: str


def imagenet_labels() -> list[Label]:
    """Return the 1000 classes of ImageNet-1K in index order, with distinct names."""
    content = IMAGENET_FILE.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != IMAGENET_SHA256:
        raise ElfattError(f"{IMAGENET_FILE} has sha256 {digest}; accepted is {IMAGENET_SHA256}. Reinstall elfatt-sd.")
    rows = csv.DictReader(io.StringIO(content.decode()))
    indexed = ((int(row["index"]), row) for row in rows)
    return [Label(index, row["wnid"], TOLD_APART.get(index, row["short_name"])) for index, row in indexed]


def read_labels(path: Path) -> list[Label]:
    """Read labels from a text file (one per line) or a `.csv` with a column `name` (or `label`), optionally `wnid`."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ElfattError(f"labels {path} cannot be read ({error}); give a UTF-8 text file or .csv.") from error
    csv_file = path.suffix.lower() == ".csv"
    pairs = _csv_pairs(path, text) if csv_file else [("", line.strip()) for line in text.split("\n")]
    labels = [Label(index, wnid, name) for index, (wnid, name) in enumerate(pair for pair in pairs if pair[1])]
    if not labels:
        raise ElfattError(f"labels {path} is empty; give one label per line.")
    seen: set[str] = set()
    for label in labels:
        if label.name in seen:
            raise ElfattError(f"labels {path} names {label.name!r} twice; every label must be distinct.")
        if "\0" in label.name:
            raise ElfattError(f"labels {path} has {label.name!r}, with a character that is not text (NUL).")
        seen.add(label.name)
    return labels


def _csv_pairs(path: Path, text: str) -> list[tuple[str, str]]:
    rows = [row for _, row in table_rows(path, text, ",")]
    columns = list(rows[0]) if rows else []
    column = next((name for name in ("name", "label") if name in columns), None)
    if column is None and columns:
        raise ElfattError(f"labels {path} has columns {', '.join(columns)}; accepted are name or label, and wnid.")
    return [((row.get("wnid") or "").strip(), (row[column] or "").strip()) for row in rows] if column else []


def load_labels(name: str) -> list[Label]:
    """Return a named list (`imagenet1k`, `toy`), or read a file."""
    if name == "imagenet1k":
        return imagenet_labels()
    if name == "toy":
        from elfatt_sd.toy.renderer import CLASS_PROMPTS

        return [Label(index, "", text) for index, text in enumerate(CLASS_PROMPTS)]
    path = Path(name)
    if not os.path.isfile(path):  # which takes any name
        raise ElfattError(f"labels={name!r} is not known; accepted: imagenet1k, toy, or a .txt or .csv file.")
    return read_labels(path)


def build_prompts(labels: Sequence[Label], template: str, images_per_class: int) -> list[Prompt]:
    """Make the prompts of a run, class after class."""
    if not labels:
        raise ElfattError("labels is empty; give at least one.")
    if images_per_class < 1:
        raise ElfattError(f"images_per_class={images_per_class} is not accepted; give a whole number of at least 1.")
    _check_template(template)
    _check_count(len(labels), images_per_class)
    articles = ["an" if label.name[:1].lower() in set("aeiou") else "a" for label in labels]
    texts = [
        template.format(label=label.name, wnid=label.wnid, index=label.index, article=article)
        for label, article in zip(labels, articles, strict=True)
    ]
    return [
        Prompt(position * images_per_class + copy, label.index, text)
        for position, (label, text) in enumerate(zip(labels, texts, strict=True))
        for copy in range(images_per_class)
    ]


def _check_count(texts: int, images_each: int) -> None:
    if texts * images_each > MOST_IMAGES:
        what = f"images_per_class={images_each} with {texts} labels or prompts"
        raise ElfattError(f"{what} is not accepted; accepted: {MOST_IMAGES} images a row at most.")


def _check_template(template: str) -> None:
    try:
        parts = [part for part in string.Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise ElfattError(f"template={template!r} is not accepted ({error}); write {{label}}.") from error
    fields = {f"{field}{f'!{how}' if how else ''}{f':{shape}' if shape else ''}" for _, field, shape, how in parts}
    unknown = sorted(fields - {"label", "wnid", "index", "article"})
    if unknown or "label" not in fields:
        what = f"the field {unknown[0]!r}" if unknown else "no field {label}"
        raise ElfattError(f"template={template!r} has {what}; accepted: {{label}}, {{wnid}}, {{index}}, {{article}}.")


def run_prompts(protocol: Protocol) -> list[Prompt]:
    """Return the prompts of each row's images, in the order of their indices."""
    prompts = spread(_all_prompts(protocol), protocol.limit)
    offsets = sorted([0, *(cell.seed_offset for cell in protocol.cells if cell.role == "null")])
    for first, second in itertools.pairwise(offsets):
        if second - first < len(prompts):
            raise ElfattError(
                f"seed_offset={second} is not accepted; with {len(prompts)} images a row, give null rows offsets that "
                f"are {len(prompts)} or more above 0 and above each other."
            )
    return [replace(prompt, index=index) for index, prompt in enumerate(prompts)]


def _all_prompts(protocol: Protocol) -> list[Prompt]:
    if protocol.prompts is not None:
        return prompts_of_file(protocol.prompts, protocol.classes, protocol.images_per_class)
    labels = spread(load_labels(protocol.labels), protocol.classes)
    return build_prompts(labels, protocol.template, protocol.images_per_class)


def prompts_of_file(source: PromptFile, count: int, images_each: int) -> list[Prompt]:
    chosen = spread(read_prompts(source), count)
    _check_count(len(chosen), images_each)
    repeated = [each for each in chosen for _ in range(images_each)]
    return [Prompt(index, each.cluster, each.text) for index, each in enumerate(repeated)]


def spread(values: Sequence[Value], count: int) -> list[Value]:
    """Return so many of the values, in order: one drawn from each of `count` equal stretches, always the same.

    The draw keeps the choice from falling in step with lists that repeat, such as combinations of attributes. 0, or
    more than there are, returns all values.
    """
    if not 0 < count < len(values):
        return list(values)
    draw = random.Random(0).random
    return [values[int((index + draw()) * len(values) / count)] for index in range(count)]
