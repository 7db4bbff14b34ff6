"""Small and invented runs of the evaluation, with their references."""

from __future__ import annotations

import io
import json
import random
import re
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from elfatt_sd.evaluation import generate, protocols
from elfatt_sd.evaluation.features import Extractor
from elfatt_sd.evaluation.prompts import run_prompts
from elfatt_sd.evaluation.protocols import Cell, Protocol, load_protocol
from elfatt_sd.evaluation.records import MadeImage
from elfatt_sd.evaluation.reference import Reference, build_reference, renders
from elfatt_sd.evaluation.run import RUN_FILE, RowFolder, RunFolder, clear_disk_errors
from elfatt_sd.evaluation.statistics import moments
from elfatt_sd.files import folder_lock, sha256_of_file

# Features of which the distribution is known.


def normal(count: int, dimension: int, seed: int) -> Tensor:
    return torch.randn(count, dimension, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spread(dimension: int) -> Tensor:
    """Standard deviations that fall off, as those of real features do."""
    return torch.arange(1, dimension + 1, dtype=torch.float64) ** -0.5


# An extractor that needs no weights: quick, exact, and blind to the order of a batch.


class Regions(nn.Module):
    """The mean colour of the four quarters of a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.calls = 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += len(images)
        return nn.functional.adaptive_avg_pool2d(images.float(), 2).flatten(1) / 255 * self.scale


def regions() -> Extractor:
    return Extractor("regions", "FD-regions", 12, Regions(), {"network": "means of quarters"})


# What a small run needs; the fixture `workplace` has its models.

ROOT = Path(__file__).parents[2]
LABELS = ("cat", "dog", "owl", "fox", "crane")
UNTOUCHED = """
[[cells]]
label = "SD (Baseline)"
method = "sd"
role = "baseline"

[[cells]]
label = "SD, other seeds"
method = "sd"
role = "null"
"""
CELLS = f"""{UNTOUCHED}
[[cells]]
label = "ELFATT-SD"
method = "elfatt"
ratio = 0.5
block_size = 16
agents = 8

[[cells]]
label = "tomesd"
method = "tome"
peer = "tomesd"
ratio = 0.5
"""
TWO_PROCESSES = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
TWO_PROCESSES += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
TWO_PROCESSES += ["--main_process_port", "0"]  # any free one: tests run side by side


def write_protocol(folder: Path, model: Path, cells: str = CELLS) -> Path:
    """Write a protocol for a model like Stable Diffusion 1.5: five 32x32 images a row in batches of two, four steps."""
    path, labels = folder / "small.toml", folder / "labels.txt"
    labels.write_text("\n".join(LABELS) + "\n")
    path.write_text(f"""
name = "small"
description = "A few small random images."
model = "{model}"
steps = 4
height = 32
width = 32
dtype = "float32"
device = "cpu"
batch = 2
labels = "{labels}"
seed = 3
{cells}
""")
    return path


def small_protocol(folder: Path, model: Path, *overrides: str, cells: str = CELLS) -> Protocol:
    return load_protocol(write_protocol(folder, model, cells), overrides)


def full_overrides(workplace: Path) -> list[str]:
    """Return what gives the small protocol every stage; see the fixture `workplace`."""
    return [
        f'extractors=["clip:{workplace / "clip"}"]',
        f"reference.source={workplace / 'val'}",
        "reference.count=12",
        "time.repeats=2",
        "time.batch=1",
        "memory.batches=[1, 2]",
        "memory.steps=2",
    ]


def make(run_dir: Path, protocol: Protocol, *reuse: Path) -> dict[str, str]:
    """Make the images of a run, and return the rows that failed."""
    with clear_disk_errors(run_dir), folder_lock(run_dir):
        others = [RunFolder.open(folder) for folder in reuse]
        return generate.generate(RunFolder(run_dir, protocol), reuse=others, show_progress=False)


def row_of(run_dir: Path, cell: Cell) -> RowFolder:
    return RowFolder(run_dir / "cells" / cell.name)


def run_data(run_dir: Path) -> dict[str, Any]:
    """Return what `run.json` holds."""
    data: dict[str, Any] = json.loads((run_dir / RUN_FILE).read_text(encoding="utf-8"))
    return data


def tree(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# A run as the harness leaves it, of noise instead of images, and with made-up figures.

METHODS = (("tome", "ToMe-SD", 2.2), ("agent", "Agent-SD", 3.4), ("elfatt", "ELFATT-SD", 1.4))
PUBLISHED = {
    "tome": {0.1: (30.7, 0.788, 0.80), 0.3: (30.6, 0.748, 0.80), 0.5: (30.9, 0.714, 0.70)},
    "agent": {0.1: (30.2, 0.794, 1.00), 0.3: (30.3, 0.760, 1.00), 0.5: (30.7, 0.724, 0.70)},
    "elfatt": {0.1: (30.2, 0.772, 0.80), 0.3: (30.4, 0.739, 0.75), 0.5: (30.4, 0.707, 0.70)},
}
PICTURES = 64  # of a row, by the results; the folder has the first few
FAILED = "agent-0.5"
NO_MEMORY = "tome-0.3"


def prompt(index: int) -> str:
    colours, shapes = ("red", "blue", "green", "yellow", "purple", "orange"), ("circle", "square", "triangle", "star")
    return f"a {colours[index % 6]} {shapes[index % 4]} on a striped {colours[(index * 5 + 2) % 6]} background"


def picture(index: int, change: float, size: int = 256) -> Image.Image:
    """Draw smooth noise; `change` lets it show through itself upside down."""
    image = photo(index, (size, size), max(size // 16, 8))
    return Image.blend(image, image.rotate(180), change / 20)


def build_run(folder: Path, *, images: int = 12, size: int = 128) -> dict:
    """Write a run of 11 rows, of which one failed and one has no memory figures; return its results."""
    chance = random.Random(0)
    rows = [
        _row("sd", "SD (Baseline)", "sd", {}, "baseline", 0.0, chance),
        _row("sd-null", "SD, other seeds", "sd", {}, "null", 6.0, chance),
        *(
            _row(f"{method}-{ratio}", label, method, {"ratio": ratio}, "method", change * ratio, chance)
            for method, label, change in METHODS
            for ratio in (0.1, 0.3, 0.5)
        ),
    ]
    for row in rows:
        if row["cell"] == FAILED:
            row |= dict.fromkeys(("distances", "paired", "accuracy", "most_changed", "time", "memory"))
            row["failed"] = "picture 7 is black (all pixels 0); 8 of 12 pictures were made"
        if row["cell"] == NO_MEMORY:
            row["memory"] = None
        change = dict((method, change) for method, _, change in METHODS).get(row["method"], 0.0)
        change *= row["settings"].get("ratio", 0)
        first = 1000 if row["role"] == "null" else 0
        if not row["failed"]:
            write_row(
                RowFolder(folder / "cells" / row["cell"]),
                [picture(first + index, change, size) for index in range(images)],
                prompt=[prompt(index) for index in range(images)],
                class_index=range(images),
                seed=range(first, first + images),
            )
    results = _results(rows)
    save(folder, results)
    return results


def build_sweep() -> dict:
    """Return results of 40 rows of many methods with long labels, some swept, with UNet time and no memory."""
    chance = random.Random(1)
    rows = [_row("sd", "SD (Baseline)", "sd", {}, "baseline", 0.0, chance)]
    rows.append(_row("sd-null", "SD, other seeds", "sd", {}, "null", 6.0, chance))
    for number in range(20):
        label = f"blocks of a stratified sample, drawn anew in every layer, from step {number} on"
        rows.append(_row(f"late{number}", label, "custom", {}, "method", 0.2 + number / 20, chance))
    for ratio in (0.3, 0.5):
        for size_of_block in (32, 56, 81, 128, 227, 512):
            settings = {"ratio": ratio, "block_size": size_of_block}
            label = "ELFATT with blocks along a curve in the first fifth of all steps"
            name = f"curve-ratio{ratio}-block_size{size_of_block}"
            rows.append(_row(name, label, "custom", settings, "method", 0.1 + ratio, chance))
    for until in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6):
        rows.append(_row(f"until{until}", "ToMe, then exact", "custom", {"until": until}, "method", until, chance))
    for row in rows:
        row["memory"] = None
        del row["time"]["end_to_end"]
    return _results(rows) | {"published": None}


def _results(rows: list[dict]) -> dict:
    return {
        "format": 1,
        "name": "toy_full",
        "description": "The shape of the paper's table on the embedded toy pipeline.",
        "identity": "4f1d0c6e5b",
        "protocol": {
            "name": "toy_full", "model": "toy", "scheduler": "stored", "steps": 25, "guidance": 7.5, "height": 256,
            "width": 256, "dtype": "float32", "batch": 4, "labels": "toy", "template": "{label}", "seed": 0, "limit": 0,
            "reference": {"source": "toy", "count": 2048, "size": 0}, "extractors": ["toy"],
            "time": {"repeats": 5, "warmup": 1, "batch": 2}, "cells": [{"name": row["cell"]} for row in rows],
        },
        "environment": {
            "elfatt_sd": "0.1.0", "commit": "2051285f36c91da5de5095001b824bf8c43c1990", "python": "3.11.7",
            "platform": "Linux-x86_64", "packages": {"torch": "2.15.0", "diffusers": "0.42.1"},
            "device": "2 cores of AMD EPYC", "cpu": "AMD EPYC", "cpu_cores": 2, "cpu_threads": 2,
            "keeps_freed_memory": False, "ram_gib": 15.625, "cuda": None,
            "attention_backends": {"scaled_dot_product_attention": ["flash (CPU)", "math"]},
        },
        "rows": rows,
        "reference": {"FD-toy": {"source": "renders", "count": 10_000, "features": 32}},
        "published": {
            "source": "tabSD",
            "rows": [
                {"label": "SD (Baseline)", "FID": 31.0, "seconds_per_image": 0.768, "gb_per_image": 0.80},
                *(
                    {"label": label, "ratio": ratio, "FID": fid, "seconds_per_image": time, "gb_per_image": memory}
                    for method, label, _ in METHODS
                    for ratio, (fid, time, memory) in PUBLISHED[method].items()
                ),
            ],
        },
    }  # fmt: skip


def save(folder: Path, results: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, ensure_ascii=False), encoding="utf-8")


def _row(cell, label, method, settings, role, change, chance) -> dict:  # type: ignore[no-untyped-def]
    baseline, null, ratio = role == "baseline", role == "null", settings.get("ratio", 0)
    difference = 0.0 if baseline else 0.21 if null else round(change * 1.9 - 0.45, 3)
    half = 0.62 if null else 0.55
    verdict = "worse" if difference > half else "better" if difference < -half else "no difference shown"
    distances = {"FD-toy": _around(18.4 + difference, 1.6), "KD-toy": _around(0.0121 + difference / 900, 0.002)}
    accuracy = _around(0.95 - change / 40, 0.03)
    if not baseline:
        distances["FD-toy"]["difference"] = _around(difference, half) | {"verdict": verdict}
        distances["KD-toy"]["difference"] = _around(difference / 900, half / 900) | {"verdict": verdict}
        accuracy["difference"] = _around(accuracy["value"] - 0.95, 0.02) | {"verdict": "no difference shown"}
    psnr, ssim, cosine = (12.4, 0.47, 0.69) if null else (34 - 5.2 * change, 0.97 - change / 12, 0.99 - change / 20)
    pairs = {
        "classes": list(range(PICTURES)),
        "psnr": _spread(psnr, 2.1) | {"unit": "dB", "identical": 0, "pictures": _each(psnr, 2.1)},
        "ssim": _spread(ssim, 0.02) | {"pictures": _each(ssim, 0.02)},
        "cosine": _spread(cosine, 0.01),
    }
    speed = 1 + (0.55 * ratio - 0.03 * (method == "agent") if role == "method" else 0)
    slope = 0.214 - 0.1 * ratio
    return {
        "cell": cell, "label": label, "method": method, "settings": settings, "role": role,
        "images": PICTURES, "classes": PICTURES, "distances": distances, "paired": None if baseline else pairs,
        "accuracy": {name: dict(accuracy) for name in ("shape", "color", "mean")},
        "most_changed": [] if baseline else [3, 7, 1, 9],
        "time": {"end_to_end": _timing(3.12, speed, chance), "unet": _timing(2.61, speed + 0.02, chance)},
        "memory": {
            "gib_per_image": slope, "interval": [slope - 0.006, slope + 0.006],
            "intercept_gib": 0.92, "fit_error_gib": 0.004, "kind": "VmHWM",
            "peaks_gib": [0.92 + slope * batch + chance.uniform(-0.004, 0.004) for batch in (1, 2, 4, 8)],
        },
        "failed": None,
    }  # fmt: skip


def _around(value: float, half: float) -> dict:
    return {"value": value, "interval": [value - half, value + half]}


def _spread(median: float, half: float) -> dict:
    mean = median + half / 9
    quartiles = [median - half, median + half * 0.8]
    interval = [mean - half / 5, mean + half / 5]
    return {"median": median, "mean": mean, "interval": interval, "quartiles": quartiles, "lowest": median - 2 * half}


def _each(median: float, half: float) -> list[float]:
    """One number for each picture; the fourth is the lowest."""
    return [median - 2 * half + half * ((index + PICTURES - 3) % PICTURES) / 16 for index in range(PICTURES)]


def _timing(untouched: float, speed: float, chance: random.Random) -> dict:
    values = [untouched / speed * chance.uniform(0.97, 1.04) for _ in range(5)]
    ratio = {"median": speed, "low": speed - 0.04, "high": speed + 0.03}
    return {"seconds_per_image": sorted(values)[2], "values": values, "ratio": ratio}


def write_row(row: RowFolder, pictures: Sequence[Image.Image], **columns: Sequence[Any]) -> None:
    """Write the images of a row and their list, which has a column for each field of `MadeImage`."""
    row.images_folder.mkdir(parents=True)
    made = []
    for index, image in enumerate(pictures):
        path = row.image_file(index)
        image.save(path)
        given = {name: values[index] for name, values in columns.items()}
        made.append(MadeImage(index, f"images/{path.name}", sha256=sha256_of_file(path), **given))
    row.finish(msgspec.json.Encoder().encode_lines(made))


# A dozen small images in every kind of source, and their reference.

PHOTOS = 12
WNIDS = ("n01440764", "n01443537", "n02012849")


def photo(seed: int, size: tuple[int, int] = (40, 32), grain: int = 8) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1] // grain, size[0] // grain, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


FILES = {f"ILSVRC2012_val_{number:08d}.JPEG": encoded(photo(number)) for number in range(1, PHOTOS + 1)}


def write_folder(folder: Path, *, by_class: bool = False) -> Path:
    for number, (name, content) in enumerate(FILES.items()):
        path = folder / WNIDS[number % 3] / name if by_class else folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def flat(folder: Path) -> Path:
    place = write_folder(folder / "flat")
    (place / "notes.txt").write_text("no photo")
    return place


def classes(folder: Path) -> Path:
    return write_folder(folder / "classes", by_class=True)


def linked_classes(folder: Path) -> Path:
    """Class folders and pictures that lie elsewhere, with links back and to nowhere."""
    source, linked = write_folder(folder / "elsewhere", by_class=True), folder / "linked"
    linked.mkdir()
    for name in WNIDS[1:]:
        (linked / name).symlink_to(source / name, target_is_directory=True)
    (linked / WNIDS[0]).mkdir()
    for path in (source / WNIDS[0]).iterdir():
        (linked / WNIDS[0] / path.name).symlink_to(path)
    (source / WNIDS[1] / "back").symlink_to(linked)
    (linked / "self").symlink_to(linked)
    return linked


def write_table(path: Path, numbers: range) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"bytes": content, "path": name} for name, content in list(FILES.items())[numbers.start : numbers.stop]]
    table = pyarrow.table({"image": rows, "label": [number % 3 for number in numbers]})
    parquet.write_table(table, path, row_group_size=5)
    return path


def parquet(folder: Path) -> Path:
    return write_table(folder / "val.parquet", range(PHOTOS))


def tables(folder: Path) -> Path:
    (folder / "tables").mkdir()
    for place in range(2):
        write_table(folder / "tables" / f"val-{place}.parquet", range(6 * place, 6 * place + 6))
    return folder / "tables"


KINDS = (flat, classes, linked_classes, parquet, tables)


def build(
    source: Path | str, cache: Path, extractor: Extractor | None = None, classes: Sequence[int] = (), **wanted: Any
) -> Reference:
    chosen = protocols.ReferenceChoice(str(source), **{"count": PHOTOS, **wanted})
    return build_reference(chosen, extractor or regions(), classes, cache_dir=cache)


def expected_statistics(contents: dict[str, bytes] = FILES) -> tuple[Tensor, Tensor]:
    pixels = (np.array(Image.open(io.BytesIO(content)).convert("RGB")) for content in contents.values())
    return moments(*map(regions(), (torch.from_numpy(each).permute(2, 0, 1)[None] for each in pixels)))


# A run whose images are renders of the toy, to be scored.

SCORED = (
    Cell("sd", "SD", "sd", role="baseline"),
    Cell("null", "other seeds", "sd", role="null", seed_offset=1000),
    Cell("tome", "ToMe", "tome"),
    Cell("dark", "dark", "elfatt"),
)
CLASSES = 32


def protocol(**changes: Any) -> Protocol:
    settings: dict[str, Any] = {"labels": "toy", "classes": CLASSES, "extractors": ("toy",), "device": "cpu"}
    settings |= {"reference": protocols.ReferenceChoice("toy", count=64), "height": 256, "width": 256}
    return Protocol("small", SCORED, **{**settings, **changes})


def altered(images: Tensor, cell: str) -> Tensor:
    """What each row makes of the baseline's pictures `[n, h, w, 3]`."""
    if cell == "tome":
        changed = images.clone()
        changed[2, : len(changed[2]) // 4] = 0  # one picture changes much
        changed[5] = (changed[5].int() + 3).clamp(0, 255).to(torch.uint8)  # one a little
        changed[7, 0, 0, 0] ^= 1  # one in a single value
        return changed
    return images // 3 if cell == "dark" else images


def write_run(run_dir: Path, specification: Protocol, stride: int = 4) -> Path:
    """Write a run of renders with every `stride`-th pixel; 1 leaves them as the toy's extractor knows them."""
    classes = [prompt.class_index for prompt in run_prompts(specification)]
    source = renders(2 * CLASSES, classes)
    drawn = torch.from_numpy(np.stack([source.read(entry) for entry in source.entries]))[:, ::stride, ::stride]
    run_dir.mkdir(parents=True)
    data = {"format": 1, "identity": specification.identity, "protocol": specification.to_dict()}
    (run_dir / "run.json").write_text(json.dumps({**data, "created": "today", "environment": {}}))
    for cell in specification.cells:
        rows = drawn[CLASSES:] if cell.role == "null" else altered(drawn[:CLASSES], cell.name)
        pictures = [Image.fromarray(pixels.numpy()) for pixels in rows]
        write_row(row_of(run_dir, cell), pictures, prompt="a" * CLASSES, class_index=classes, seed=range(CLASSES))
    return run_dir


# What a report holds, read back.


class Page(HTMLParser):
    """Collects elements, their attributes and all text."""

    def __init__(self, path):
        super().__init__()
        self.elements, self.text, self.inside = [], "", None
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.inside = tag

    def handle_data(self, data):
        self.text += data if self.inside not in ("script", "style") else ""

    def handle_endtag(self, tag):
        if tag == self.inside:
            self.inside = None

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def markdown_tables(text):
    """Cells of each table; a pipe after a backslash is text."""
    blocks = re.findall(r"(?:^\|.*\|\n)+", text, flags=re.MULTILINE)
    return [[re.split(r"(?<!\\)\|", line)[1:-1] for line in block.splitlines()] for block in blocks]
