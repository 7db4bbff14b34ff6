"""What the files of a run hold that are read back. Keys of later versions are ignored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.protocols import Cell
from elfatt_sd.files import check_file, read_json
from elfatt_sd.peers import PEERS

# What can change an image: of every row, and on CUDA. A thread more or less sums in another order on the CPU.
_DECISIVE = ("device", "attention_backends", "model_sha256", "prompts_sha256", "code_sha256")
_DECISIVE_CUDA = ("runtime", "cudnn", "tf32", "cudnn_tf32")
_DECISIVE_PACKAGES = ("torch", "diffusers", "transformers")
_KERNELS = {  # the package that an attention backend comes from
    "auto": "flash-attn",
    "flash": "flash-attn",
    "flash_hub": "kernels",
    "_flash_3": "flash-attn-3",
    "sage": "sageattention",
    "xformers": "xformers",
}


def same_images(before: Mapping[str, Any], now: Mapping[str, Any], cells: Iterable[Cell]) -> list[str]:
    """List what differs between two environments so that images could differ too."""
    rows = list(cells)
    old, new = ({key: value for cell in rows for key, value in _decisive(each, cell).items()} for each in (before, now))
    return [f"{key}: {old[key]} there, {new[key]} here" for key in new if old[key] != new[key]]


def _decisive(environment: Mapping[str, Any], cell: Cell) -> dict[str, Any]:
    config, cuda = cell.config(), environment.get("cuda") or {}
    packages = [*_DECISIVE_PACKAGES, *([PEERS[cell.peer].package or "diffusers"] if cell.peer else [])]
    found = {key: environment.get(key) for key in _DECISIVE}
    found |= {key: cuda.get(key) for key in _DECISIVE_CUDA}
    found["cpu_threads"] = None if cuda else environment.get("cpu_threads")
    if cell.patched:
        found["method_sha256"] = environment.get("method_sha256")
        packages += [_KERNELS[config.attention_backend]] if config.attention_backend in _KERNELS else []
    installed = environment.get("packages", {})
    return found | {name: installed.get(name) for name in packages}


Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Index = Annotated[int, Meta(ge=0, le=2**53)]
SCORES_FORMAT = 5  # of `scores.json`; what earlier versions wrote can still be shown
Ends = Annotated[list[float], Meta(min_length=2)] | None  # of an interval


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


class Difference(Struct, frozen=True):
    """A paired difference to the untouched pipeline."""

    value: float | None = None
    interval: Ends = None
    verdict: str | None = None
    images: str | None = None


class Figure(Struct, frozen=True):
    """A distance or an accuracy."""

    value: float | None = None
    interval: Ends = None
    difference: Difference | None = None


class MetricFigure(Figure, frozen=True):
    """A further metric."""

    better: str = ""  # `higher`, `lower` or neither
    compares: bool = False  # with the untouched images


class Changes(Struct, frozen=True):
    """A measure of each image against the untouched pipeline's, summed up."""

    mean: float | None = None
    interval: Ends = None
    median: float | None = None
    quartiles: Ends = None
    lowest: float | None = None
    identical: Index | None = None
    pictures: list[float | None] | None = None


class Paired(Struct, frozen=True):
    """All such measures of a row."""

    classes: list[Index] | None = None
    psnr: Changes | None = None
    ssim: Changes | None = None
    cosine: Changes | None = None


class ScoredRow(Struct, frozen=True):
    """What scoring says of a row."""

    images: Index | None = None
    classes: Index | None = None
    distances: dict[str, Figure] | None = None
    paired: Paired | None = None
    accuracy: dict[str, Figure] | None = None
    most_changed: list[Index] | None = None
    metrics: dict[str, MetricFigure] | None = None


class Scores(Struct, frozen=True):
    """`scores.json`."""

    format: Annotated[int, Meta(ge=1, le=SCORES_FORMAT)]
    identity: str
    references: dict[str, dict[str, Any]]
    rows: dict[str, ScoredRow]


class Ratio(Struct, frozen=True):
    """How many times as fast as the untouched pipeline: the median round, and the slowest and the fastest one."""

    median: float
    low: float
    high: float


class Seconds(Struct, frozen=True):
    """The seconds per image of one scope, and of each round."""

    seconds_per_image: float | None = None
    values: list[float] = []
    ratio: Ratio | None = None


class TimedRow(Struct, frozen=True):
    """The time of a row, or why it has none."""

    end_to_end: Seconds | None = None
    unet: Seconds | None = None
    attention_kernels: list[str] | None = None
    failed: str | None = None
    note: str | None = None


class Times(Struct, frozen=True):
    """`time.json`."""

    identity: str
    environment: dict[str, Any]
    rows: dict[str, TimedRow]
    errors: dict[str, str] = {}
    format: Literal[1] = 1


class RowCost(Struct, frozen=True):
    """What a row computes, or why that is not known."""

    density: float | None = None
    multiply_adds: Annotated[int, Meta(ge=0)] | None = None
    reason: str | None = None


class Cost(Struct, frozen=True):
    """`cost.json`."""

    identity: str
    rows: dict[str, RowCost]
    format: Literal[1] = 1


class Growth(Struct, frozen=True):
    """The line through the peaks of several batch sizes, in GiB."""

    gib_per_image: float | None = None
    interval: Ends = None
    intercept_gib: float | None = None
    fit_error_gib: float | None = None
    peaks_gib: list[float] | None = None


class MemoryRow(Growth, frozen=True):
    """The memory of a row, or why it has none."""

    batches: list[Index] = []
    kind: str | None = None
    stages: dict[str, Growth] | None = None
    reserved: Growth | None = None
    failed: str | None = None
    note: str | None = None
    same_program_as: str | None = None


class Peaks(Struct, frozen=True):
    """`memory.json`."""

    identity: str
    environment: dict[str, Any]
    rows: dict[str, MemoryRow]
    programs: dict[str, str]
    errors: dict[str, str] = {}
    format: Literal[1] = 1


class ResultRow(ScoredRow, frozen=True):
    """A row of `results.json`; what was not measured is not there."""

    cell: str | None = None
    label: str | None = None
    method: str | None = None
    peer: str | None = None
    role: str | None = None
    settings: dict[str, Any] | None = None
    time: TimedRow | None = None
    memory: MemoryRow | None = None
    cost: RowCost | None = None
    failed: str | None = None


class ResultsRecord(Struct, frozen=True):
    """`results.json`."""

    format: Literal[1]
    rows: list[ResultRow]
    name: str | None = None
    description: str | None = None
    identity: str | None = None
    protocol: dict[str, Any] | None = None
    environment: Environment | None = None
    reference: dict[str, dict[str, Any]] | None = None
    published: dict[str, Any] | None = None


def read_data(path: Path, shape: type[Any], remedy: str, identity: str | None = None) -> dict[str, Any] | None:
    """Return the plain data of a file that holds a record, None where there is no file."""
    data = read_json(path, remedy)
    if data is not None:
        check_file(path, data, shape, remedy)
        if identity is not None and data["identity"] != identity:
            raise ElfattError(f"{path} is of another run, of identity {data['identity'][:12]!r}; {remedy}.")
    return data if isinstance(data, Mapping) else None  # type: ignore[return-value]


def is_whole(path: Path, shape: type[Any], identity: str) -> bool:
    try:
        return read_data(path, shape, "", identity) is not None
    except ElfattError:
        return False
