"""A dozen small images in every kind of source, and their reference."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from extractors import regions
from PIL import Image

from elfatt_sd.evaluation.features import Extractor
from elfatt_sd.evaluation.reference import Reference, Wanted, build_reference
from elfatt_sd.evaluation.statistics import FeatureStatistics
from elfatt_sd.progress import Progress

COUNT = 12


WNIDS = ("n01440764", "n01443537", "n02012849")


def picture(seed: int, size: tuple[int, int] = (40, 32)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1] // 8, size[0] // 8, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


FILES = {f"ILSVRC2012_val_{number:08d}.JPEG": encoded(picture(number)) for number in range(1, COUNT + 1)}


def write_folder(folder: Path, *, by_class: bool = False) -> Path:
    for number, (name, content) in enumerate(FILES.items()):
        path = folder / WNIDS[number % 3] / name if by_class else folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def flat(folder: Path) -> Path:
    (folder / "flat").mkdir()
    (folder / "flat" / "notes.txt").write_text("no picture")
    return write_folder(folder / "flat")


def classes(folder: Path) -> Path:
    return write_folder(folder / "classes", by_class=True)


def linked_classes(folder: Path) -> Path:
    """Class folders and pictures that lie elsewhere, with links back and to nowhere."""
    source = write_folder(folder / "elsewhere", by_class=True)
    (folder / "linked").mkdir()
    for name in WNIDS[1:]:
        (folder / "linked" / name).symlink_to(source / name, target_is_directory=True)
    (folder / "linked" / WNIDS[0]).mkdir()
    for path in (source / WNIDS[0]).iterdir():
        (folder / "linked" / WNIDS[0] / path.name).symlink_to(path)
    (source / WNIDS[1] / "back").symlink_to(folder / "linked")
    (folder / "linked" / "self").symlink_to(folder / "linked")
    return folder / "linked"


def write_table(path: Path, numbers: range) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    files = list(FILES.items())
    rows = [{"bytes": files[number][1], "path": files[number][0]} for number in numbers]
    table = pyarrow.table({"image": rows, "label": [number % 3 for number in numbers]})
    parquet.write_table(table, path, row_group_size=5)
    return path


def parquet(folder: Path) -> Path:
    return write_table(folder / "val.parquet", range(COUNT))


def tables(folder: Path) -> Path:
    (folder / "tables").mkdir()
    for place in range(2):
        write_table(folder / "tables" / f"val-{place}.parquet", range(6 * place, 6 * place + 6))
    return folder / "tables"


KINDS = (flat, classes, linked_classes, parquet, tables)


def build(
    source: Path | str, cache: Path, extractor: Extractor | None = None, progress: Progress | None = None, **wanted: Any
) -> Reference:
    asked = Wanted(str(source), **{"expected": COUNT, **wanted})
    return build_reference(asked, extractor or regions(), cache_dir=cache, progress=progress)


def expected_statistics(contents: dict[str, bytes] = FILES) -> FeatureStatistics:
    extractor, found = regions(), FeatureStatistics(12)
    for content in contents.values():
        pixels = np.array(Image.open(io.BytesIO(content)).convert("RGB"))
        found.update(extractor(torch.from_numpy(pixels).permute(2, 0, 1)[None]))
    return found
