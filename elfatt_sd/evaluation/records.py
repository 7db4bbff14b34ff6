"""What the files of a run hold that are read back. Keys of later versions are ignored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.protocols import Cell, differences
from elfatt_sd.evaluation.statistics import FEWEST_CLASSES, TOO_FEW
from elfatt_sd.files import check_file, read_json
from elfatt_sd.peers import PEERS

# What can change an image: of every row, and on CUDA. A thread more or less sums in another order on the CPU.
_DECISIVE = ("device", "attention_backends", "model_sha256", "prompts_sha256", "code_sha256")
_DECISIVE_CUDA = ("runtime", "cudnn", "tf32", "cudnn_tf32")
_DECISIVE_PACKAGES = ("torch", "diffusers", "transformers")
_KERNELS = ("flash-attn", "kernels", "flash-attn-3", "sageattention", "xformers")  # what attention backends come from


def same_images(before: Mapping[str, Any], now: Mapping[str, Any], cells: Iterable[Cell]) -> list[str]:
    """List what differs between two environments so that images of some rows could differ too."""
    sides: list[dict[str, Any]] = [{}, {}]
    for cell in cells:
        keys = [*_DECISIVE, *(["method_sha256"] if cell.patched else [])]
        packages = [*_DECISIVE_PACKAGES, *([PEERS[cell.peer].package or "diffusers"] if cell.peer else [])]
        packages += _KERNELS if cell.patched and cell.config().attention_backend != "auto" else ()
        for side, environment in zip(sides, (before, now), strict=True):
            cuda, installed = environment.get("cuda") or {}, environment.get("packages", {})
            side |= {key: environment.get(key) for key in keys}
            side |= {key: cuda.get(key) for key in _DECISIVE_CUDA}
            side["cpu_threads"] = None if cuda else environment.get("cpu_threads")
            side |= {name: installed.get(name) for name in packages}
    return differences(*sides)


Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Index = Annotated[int, Meta(ge=0, le=2**53)]
SCORES_FORMAT = 5  # of `scores.json`; what earlier versions wrote can still be shown
Ends = Annotated[list[float], Meta(min_length=2)] | None  # of an interval


@dataclass(frozen=True)
class Estimate:
    """A value with the ends of its interval, where there is one."""

    value: float
    ends: tuple[float, float] | None = None


def estimate(value: float | None, ends: Sequence[float] | None = None) -> Estimate | None:
    if value is None:
        return None
    return Estimate(value, (ends[0], ends[-1]) if ends else None)


# A field that was not measured has its default; `null` in a file is the same as no key.


class RunRecord(Struct, frozen=True):
    """`run.json`: whose run a folder is."""

    format: Literal[1]
    identity: str
    created: str
    protocol: dict[str, Any]
    environment: dict[str, Any]


class MadeImage(Struct, frozen=True):
    index: Index
    file: str
    prompt: str
    class_index: Index
    seed: int
    sha256: Sha256


class Failure(Struct, frozen=True):
    """`failed.json`: why a row has no images."""

    reason: str


class _Valued(Struct, frozen=True):
    value: float | None = None
    interval: Ends = None

    @property
    def estimate(self) -> Estimate | None:
        return estimate(self.value, self.interval)


class Difference(_Valued, frozen=True):
    """A paired difference to the untouched pipeline."""

    verdict: str | None = None
    images: str | None = None  # `infinite` where it is extrapolated


class Figure(_Valued, frozen=True):
    """A distance, an accuracy or a further metric."""

    difference: Difference = Difference()
    better: str = ""  # of a metric: `higher`, `lower` or neither
    compares: bool = False  # of a metric: with the untouched images


class Changes(Struct, frozen=True):
    """A measure of each image against the untouched pipeline's, summed up."""

    mean: float | None = None
    interval: Ends = None
    median: float | None = None
    quartiles: Ends = None
    lowest: float | None = None
    identical: Index | None = None
    pictures: list[float | None] = []

    @property
    def estimate(self) -> Estimate | None:
        return estimate(self.mean, self.interval)


class Paired(Struct, frozen=True):
    classes: list[Index] = []
    psnr: Changes = Changes()
    ssim: Changes = Changes()
    cosine: Changes = Changes()


class ReferenceRecord(Struct, frozen=True):
    unreadable: list[str] = []  # name and reason of each image


class StageFile(Struct, frozen=True):
    """What a stage writes; `Results` says what its rows hold."""

    identity: str
    rows: dict[str, dict[str, Any]]
    format: Annotated[int, Meta(ge=1, le=SCORES_FORMAT)] = 1


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

    @property
    def speed(self) -> Estimate | None:
        ratio = self.ratio
        return None if ratio is None else Estimate(ratio.median, (ratio.low, ratio.high))


class TimedRow(Struct, frozen=True):
    end_to_end: Seconds = Seconds()
    unet: Seconds = Seconds()
    failed: str | None = None


class RowCost(Struct, frozen=True):
    density: float | None = None
    multiply_adds: Annotated[int, Meta(ge=0)] | None = None
    reason: str | None = None  # why it is not known


class MemoryRow(Struct, frozen=True):
    """The line through the peaks of several batch sizes, in GiB."""

    gib_per_image: float | None = None
    interval: Ends = None
    intercept_gib: float | None = None
    fit_error_gib: float | None = None
    kind: str | None = None
    failed: str | None = None
    note: str | None = None


class ResultRow(Struct):
    images: Index | None = None
    classes: Index | None = None
    distances: dict[str, Figure] = {}
    paired: Paired = Paired()
    accuracy: dict[str, Figure] = {}
    most_changed: list[Index] = []
    metrics: dict[str, Figure] = {}
    cell: str = ""  # the folder of its images
    label: str = ""  # the method's name in tables
    method: str = ""
    peer: str = ""
    role: str = "method"
    settings: dict[str, Any] = {}
    time: TimedRow = TimedRow()
    memory: MemoryRow = MemoryRow()
    cost: RowCost = RowCost()
    failed: str | None = None


def without_nulls(data: Any) -> Any:
    """Leave out keys of plain data that hold nothing; a list keeps its places."""
    if isinstance(data, Mapping):
        return {key: without_nulls(value) for key, value in data.items() if value is not None}
    return [without_nulls(value) for value in data] if isinstance(data, list) else data


def read_data(path: Path, shape: type[Any], remedy: str, identity: str | None = None) -> dict[str, Any] | None:
    """Return the plain data of a file that holds a record, None where there is no file."""
    data: dict[str, Any] | None = read_json(path, remedy)
    if data is not None:
        check_file(path, without_nulls(data), shape, remedy)
        if identity is not None and data["identity"] != identity:
            raise ElfattError(f"{path} is of another run, of identity {data['identity'][:12]!r}; {remedy}.")
    return data


_OVER_CLASSES = ("distances", "paired", "accuracy", "metrics")  # parts of a row with intervals over classes


def without_intervals_of_few(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Leave out of rows what is of too few classes for a reader: intervals that miss rare damage, and what they bound.

    Those are the intervals of every difference and of every figure but an accuracy, which knows how few classes there
    are, and the value of a difference that is extrapolated to infinitely many images. `scores.json` keeps all of them.
    """

    def bare(data: Any, part: str) -> Any:
        if not isinstance(data, Mapping):
            return data
        hidden = ["interval"] if part != "accuracy" or "verdict" in data else []
        hidden += ["value"] if data.get("images") == "infinite" else []
        return {name: None if name in hidden else bare(value, part) for name, value in data.items()}

    few = any(isinstance(count, int) and 0 < count < FEWEST_CLASSES for count in [row.get("classes") for row in rows])
    if not few and f"'verdict': {TOO_FEW!r}" not in str([[row.get(part) for part in _OVER_CLASSES] for row in rows]):
        return list(rows)
    return [{key: bare(value, key) if key in _OVER_CLASSES else value for key, value in row.items()} for row in rows]
