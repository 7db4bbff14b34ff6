"""Protocols: what is evaluated, as frozen dataclasses. `protocol_files` reads them from TOML.

The identity of a run is the hash of its resolved protocol, overrides included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from elfatt_sd.config import ElfattError, PatchConfig
from elfatt_sd.evaluation.metrics.choice import MetricChoice, check_side
from elfatt_sd.evaluation.prompt_files import PromptFile
from elfatt_sd.files import is_plain_name, one_folder, sha256_of_data
from elfatt_sd.optional import REPORT, need
from elfatt_sd.peers import PEERS, check_settings, packages_of
from elfatt_sd.presets import known_method
from elfatt_sd.settings import setting_names
from elfatt_sd.typed import checked, known_keys, refused

Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Maybe = Annotated[int, Meta(ge=0)]  # 0 stands for all, none, or the protocol's own
Pixels = Annotated[int, Meta(ge=8, multiple_of=8)]
Scope = Literal["end_to_end", "unet"]
SCOPES: tuple[Scope, ...] = ("end_to_end", "unet")
FEW_REPEATS = 5  # rounds of timing; with fewer the results say so, and claim no gain
NULL_SEED_OFFSET = 1_000_000  # the null row's seeds start here, past those of every image of a run
_IN_PLACE = "tomesd"  # its rows name the preset that does the same, and have its settings
PRINTED = ("FID", "seconds_per_image", "gb_per_image")  # the figures of a published row
_REPORT_ONLY = ("description", "published", "frame_rate")  # words and printed figures: they change no measurement
_UNGIVEN: list[tuple[str, Any]] = [
    ("variant", ""),
    ("prompts", None),
    ("metrics", []),
    ("frames", 1),
    ("negative_prompt", ""),
]  # keys that are younger than results that are published
_LENIENT = {"reference": ("allow_count",)}  # lets a run go on; what it let pass stands in the metric's name
NAME = "letters, digits and . _ - + =, and no name that a system keeps for itself"


@dataclass(frozen=True)
class Cell:
    """One row of the table: a method with its settings."""

    name: str  # folder of the row's images
    label: str  # name in the table
    method: str  # one of `METHODS`, or `custom` where `phases` are given
    # `baseline` (the untouched pipeline), `null` (the same with other seeds) or `method`
    role: Literal["baseline", "null", "method"] = "method"
    # settings of the method, as `PatchConfig.with_settings` takes them
    settings: Mapping[str, Any] = field(default_factory=dict)
    phases: tuple[Mapping[str, Any], ...] = ()  # phases of a custom method, as `Phase` takes them
    # layers with phases of their own, as `PatchConfig.from_dict` takes them
    per_layer: tuple[Mapping[str, Any], ...] = ()
    # the values, by a name for tables, that this row took where a phase lists several; they stand in `phases`
    swept: Mapping[str, Any] = field(default_factory=dict)
    # another package's accelerator, as `elfatt_sd.peers` names it. One that a patch can join is on together with the
    # method; the others take the patch's place.
    peer: str = ""
    peer_settings: Mapping[str, Any] = field(default_factory=dict)  # of the peer; tomesd's may stand in `settings`
    seed_offset: int = 0  # of the null row, added to the seed of every image; at least the number of images

    def __post_init__(self) -> None:
        if not is_plain_name(self.name):
            raise refused(f"cell name {self.name!r}", NAME)
        if (self.role == "null") != (self.seed_offset > 0) or self.seed_offset < 0:
            accepted = "at least the number of images for the null row, 0 for all others"
            raise refused(f"seed_offset={self.seed_offset} of cell {self.name!r}", accepted)
        try:
            config = self.config()
            self._check_peer(config)
        except ElfattError as error:
            raise ElfattError(f"cell {self.name!r}: {error}") from error
        if (self.role != "method") != (not config.all_phases and not self.peer):
            raise refused(
                f"role={self.role!r} of cell {self.name!r} with method {self.method!r}",
                "baseline and null for the untouched pipeline (method 'sd'), method for all others",
            )

    def _check_peer(self, config: PatchConfig) -> None:
        if self.peer:
            check_settings(self.peer, self.options)
        elif self.peer_settings:
            raise refused("peer_settings without a peer", "settings together with a peer")
        if self.peer and self.peer != _IN_PLACE and not PEERS[self.peer].joins and config.active:
            raise refused(f"method={self.method!r} with peer {self.peer!r}", "sd, as it takes the patch's place")

    @property
    def options(self) -> dict[str, Any]:
        """Settings of the peer."""
        return {**(self.settings if self.peer == _IN_PLACE else {}), **self.peer_settings}

    @property
    def patched(self) -> bool:
        return self.config().active and (not self.peer or PEERS[self.peer].joins)

    @property
    def shown(self) -> dict[str, Any]:
        """Settings and swept values, as tables show them."""
        return {**self.settings, **self.peer_settings, **self.swept}

    def config(self) -> PatchConfig:
        if not self.phases and not self.per_layer:
            return PatchConfig.preset(known_method(self.method), **self.settings)
        data = {"method": self.method, "phases": self.phases, "per_layer": self.per_layer}
        return PatchConfig.from_dict(data).with_settings(**self.settings)


@dataclass(frozen=True)
class Reference:
    """The images that the generated ones are compared with."""

    source: str = ""  # folder, tar, zip, shards, parquet, `.npz` of statistics, or `toy` (renders)
    count: Annotated[int, Meta(ge=1, le=1_000_000_000)] = 50_000  # number of images that there must be
    allow_count: bool = False  # accept another number, which the metric's name then says
    size: Maybe = 0  # side of the square that they are resized to; 0 leaves them as they are
    resize: str = "none"  # how the square comes about: `crop`, `stretch` or `none`
    filter: str = "bicubic"  # Pillow's resampling filter
    per_class: Maybe = 0  # take only the first so many of each class; 0 takes all


@dataclass(frozen=True)
class Time:
    """How time is measured."""

    # rounds over all rows; the results name fewer than `FEW_REPEATS`. A file may say 0 to measure none.
    repeats: Count = 5
    warmup: Maybe = 1  # untimed calls of every row before the first round, of a few steps each
    batch: Maybe = 0  # images per call; 0 takes the protocol's batch
    # `end_to_end` (prompt to uint8, no disk) and `unet` (the sum of the UNet's calls)
    scopes: Annotated[tuple[Scope, ...], Meta(min_length=1)] = SCOPES


@dataclass(frozen=True)
class Memory:
    """How memory is measured: one fresh process for every row and batch size."""

    # batch sizes, the points of the regression. A file may say [] to measure none.
    batches: tuple[Count, ...] = (1, 2, 4)
    steps: Maybe = 0  # denoising steps of each call; 0 takes the protocol's

    def __post_init__(self) -> None:
        if len(set(self.batches)) < 2:
            raise refused(f"memory.batches={list(self.batches)!r}", "two or more different batch sizes, for the slope")


@dataclass(frozen=True)
class Protocol:
    """All that decides the numbers of a run."""

    name: str  # the protocol's name, without which its figures mean nothing
    cells: tuple[Cell, ...]  # the rows
    description: str = ""  # what the protocol is, in a sentence or two
    model: str = "toy"  # `toy`, a diffusers directory, a `.safetensors` file or a hub id
    variant: str = ""  # of the model's weights, as for `load_pipeline`; empty takes those without
    scheduler: str = "stored"  # `stored` (the model's own), `PLMS`, or the name of a diffusers class
    steps: Count = 50  # denoising steps
    guidance: Annotated[float, Meta(ge=0, le=1e6)] = 7.5  # classifier-free guidance scale
    # what guidance leads away from, for every image; empty gives none. Qwen-Image and Flux guide twice a step only with
    # one.
    negative_prompt: str = ""
    height: Pixels = 512  # of the images, in pixels
    width: Pixels = 512  # of the images, in pixels
    frames: Count = 1  # of each image; more than 1 for clips, which video pipelines make
    frame_rate: Annotated[float, Meta(ge=0.01, le=1000)] = 16.0  # of clips in the report, in frames per second
    dtype: str = "float16"  # of the pipeline
    device: str = "auto"  # `auto` or a torch device
    batch: Count = 1  # images per call of the pipeline
    labels: str = "imagenet1k"  # `imagenet1k`, `toy`, or a text file of labels
    template: str = "{label}"  # prompt for a label, with `{label}` in it
    prompts: PromptFile | None = None  # a file of prompts, in place of labels and template; None has none
    images_per_class: Count = 1  # images for every label, or for every prompt of the file
    classes: Maybe = 0  # number of labels, or prompts of the file, spread evenly over the list; 0 takes all
    limit: Maybe = 0  # number of images of each row, spread evenly over the prompts; 0 takes all
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0  # image `i` has seed `seed + i`
    # feature extractors, as `elfatt_sd.evaluation.features` names them; without any, the reference is not looked at,
    # and rows are compared with the untouched pipeline only
    extractors: tuple[str, ...] = ("inception",)
    inception_weights: str = ""  # file of Inception's weights, for use without a network
    inception_sha256: str = ""  # hash that this file must have; empty takes the published one
    metrics: tuple[MetricChoice, ...] = ()  # further metrics
    reference: Reference = field(default_factory=Reference)  # the images to compare with
    time: Time | None = None  # how time is measured; None leaves it out
    memory: Memory | None = None  # how memory is measured; None leaves it out
    # printed figures that the report compares with ours: `source`, and `rows`. A file may name another protocol that
    # has them.
    published: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not is_plain_name(self.name) or set(self.name) & set(".+="):
            raise refused(f"name={self.name!r}", "letters, digits, _ and -, and no name that a system keeps for itself")
        if "{label}" not in self.template:
            raise refused(f"template={self.template!r}", "a text with {label} in it")
        names = [one_folder(cell.name) for cell in self.cells]
        twice = [cell.name for cell in self.cells if names.count(one_folder(cell.name)) > 1]
        if twice:
            raise refused(f"cell {twice[-1]!r}, given twice", "cells that differ; give each its own name")
        baselines = [cell.name for cell in self.cells if cell.role == "baseline"]
        if len(baselines) != 1:
            raise refused(
                f"{len(baselines)} cells of role 'baseline' ({', '.join(baselines) or 'none'})", "exactly one"
            )
        for choice in self.metrics:
            check_side(choice.metric, self.height, self.width)
        _check_published(self.published)

    @property
    def baseline(self) -> Cell:
        """The untouched pipeline, which every other row is compared with."""
        return next(cell for cell in self.cells if cell.role == "baseline")

    @property
    def of_toy(self) -> bool:
        return self.labels == "toy" and self.prompts is None

    @property
    def peers(self) -> frozenset[str]:
        """Packages that some rows run in place of this one's patch."""
        return frozenset(cell.peer for cell in self.cells if cell.peer)

    def cell(self, name: str) -> Cell:
        """Return a row by its name."""
        for cell in self.cells:
            if cell.name == name:
                return cell
        raise refused(f"cell {name!r}", ", ".join(cell.name for cell in self.cells))

    def to_dict(self) -> dict[str, Any]:
        data = _plain(dataclasses.asdict(self))
        for cell, row in zip(self.cells, data["cells"], strict=True):
            row["config"] = _plain(cell.config().to_dict())
        return dict(data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Protocol:
        """Build a protocol from what `to_dict` gave."""
        rows = data.get("cells")
        cells = [_without_config(row) for row in rows] if isinstance(rows, list | tuple) else rows
        return checked({**data, "cells": cells}, cls)

    @property
    def identity(self) -> str:
        """sha256 of all that decides a number, in hex."""
        return sha256_of_data(decisive(self.to_dict()))


def _without_config(row: Any) -> Any:
    return {key: value for key, value in row.items() if key != "config"} if isinstance(row, Mapping) else row


def decisive(data: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in data.items() if key not in _REPORT_ONLY and (key, value) not in _UNGIVEN}
    for table, lenient in _LENIENT.items():
        values = kept.get(table)
        given = values if isinstance(values, Mapping) else {}
        kept[table] = {key: value for key, value in given.items() if key not in lenient}
    return kept


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List what differs between two protocols' data, as lines such as `steps: 50 there, 25 here`."""
    old, new = _flat(decisive(before)), _flat(decisive(now))
    return [
        f"{key}: {old.get(key, 'absent')!s} there, {new.get(key, 'absent')!s} here"
        for key in dict.fromkeys([*old, *new])
        if old.get(key, _ABSENT) != new.get(key, _ABSENT)
    ]


def check_packages(protocol: Protocol) -> None:
    """Check that the packages are installed which all stages of a run need together."""
    need("an evaluation", "torchmetrics", *REPORT, *packages_of(protocol.peers))


def _check_published(published: Mapping[str, Any]) -> None:
    """Check the names in a table of printed figures; it may be empty."""
    known_keys("published.", published, ("source", "rows"))
    rows = published.get("rows", [])
    if not isinstance(rows, list | tuple) or not all(isinstance(row, Mapping) and "label" in row for row in rows):
        raise refused("published.rows", "a list of tables, each with a label")
    for row in rows:
        known_keys(f"published.rows[{row['label']}].", row, ("label", *PRINTED, *setting_names()))


def _plain(value: Any) -> Any:
    """Turn tuples into lists, as JSON has them."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


_ABSENT = object()


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables; rows go by their names."""
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        items = [(str(item.get("name", index)), item) for index, item in enumerate(value)]
    else:
        return {prefix: value}
    leaves = (_flat(item, f"{prefix}.{key}" if prefix else key) for key, item in items)
    return {name: leaf for each in leaves for name, leaf in each.items()}
