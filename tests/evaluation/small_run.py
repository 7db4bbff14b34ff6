"""What a small run needs: a random Stable Diffusion 1.5, labels, a reference folder, random CLIP weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tiny_pipelines as tiny
from PIL import Image

from elfatt_sd.evaluation import generate
from elfatt_sd.evaluation.protocols import Cell, Protocol, load_protocol
from elfatt_sd.evaluation.run import RUN_FILE, Row, Run, clear_disk_errors
from elfatt_sd.files import folder_lock

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
CELLS = (
    UNTOUCHED
    + """
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
)


TWO_PROCESSES = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
TWO_PROCESSES += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
TWO_PROCESSES += ["--main_process_port", "0"]  # any free one: tests run side by side


def write_model(folder: Path) -> Path:
    """Save a random pipeline with the layout of Stable Diffusion 1.5."""
    tiny.sd15(folder).save_pretrained(folder / "sd15")
    return folder / "sd15"


def write_clip(folder: Path) -> Path:
    """Save a random CLIP image encoder with its preprocessing."""
    tiny.image_encoder().save_pretrained(folder / "clip")
    tiny.image_processor().save_pretrained(folder / "clip")
    return folder / "clip"


def write_labels(folder: Path) -> Path:
    path = folder / "labels.txt"
    path.write_text("\n".join(LABELS) + "\n")
    return path


def write_reference(folder: Path, count: int = 12) -> Path:
    """Fill a folder with noise as the ImageNet validation set is laid out: flat, upper-case JPEG."""
    generator = np.random.default_rng(0)
    reference = folder / "val"
    reference.mkdir(parents=True)
    for index in range(1, count + 1):
        pixels = generator.integers(0, 256, (40, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(reference / f"ILSVRC2012_val_{index:08d}.JPEG", format="JPEG")
    return reference


def write_protocol(folder: Path, model: Path, cells: str = CELLS) -> Path:
    """Write a protocol for `write_model`: five 32x32 images a row in batches of two, four steps."""
    path = folder / "small.toml"
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
labels = "{write_labels(folder)}"
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
        others = [Run.open(folder) for folder in reuse]
        return generate.generate(Run(run_dir, protocol), reuse=others, show_progress=False)


def row_of(run_dir: Path, cell: Cell) -> Row:
    """Return a row of a run, where its seeds are no matter."""
    return Row(run_dir / "cells" / cell.name, cell, 0)


def run_data(run_dir: Path) -> dict[str, Any]:
    """Return what `run.json` holds."""
    data: dict[str, Any] = json.loads((run_dir / RUN_FILE).read_text(encoding="utf-8"))
    return data


def tree(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
