"""The pictures of a run, small enough to travel inside the page."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from elfatt_sd.evaluation.report.data import NULL, Results, Row, number
from elfatt_sd.files import is_plain_name


@dataclass(frozen=True)
class Detail:
    """How much of the pictures a page shows.

    Attributes:
        edge: longest side in pixels; smaller pictures keep their size.
        quality: of the WebP file, from 0 to 100.
        columns: number of latents in the grid.
        pairs: number of most changed pictures per row.
    """

    edge: int
    quality: int
    columns: int
    pairs: int


_SHOWN = 24  # frames of a clip
DETAILS = (
    Detail(448, 84, 6, 3),
    Detail(384, 80, 6, 3),
    Detail(320, 78, 6, 3),
    Detail(256, 75, 6, 3),
    Detail(256, 72, 5, 2),
    Detail(192, 70, 4, 2),
    Detail(128, 65, 4, 1),
    Detail(96, 60, 3, 1),
    Detail(64, 50, 2, 0),
    Detail(64, 50, 0, 0),
)


@dataclass(frozen=True)
class Picture:
    """One picture of one row; `uri` is None where the file is missing or cannot be read."""

    row: Row
    index: int
    prompt: str
    uri: str | None


@dataclass
class Pictures:
    """The pictures of a run, read from `RUN/cells/CELL/images`.

    Attributes:
        run_dir: the run.
        results: its rows.
    """

    run_dir: Path
    results: Results
    _encoded: dict[tuple[str, int, int, int], str | None] = field(default_factory=dict)

    @cached_property
    def rows(self) -> list[Row]:
        """The rows that start from the same latents and have pictures: all but the null row."""
        return [row for row in self.results.rows if row.role != NULL and self._indices(row)]

    @cached_property
    def prompts(self) -> dict[int, str]:
        """The prompt of each index, from the first manifest that has it."""
        prompts: dict[int, str] = {}
        for row in self.rows:
            for line in _manifest(self._folder(row) / "manifest.jsonl"):
                index, prompt = line.get("index"), line.get("prompt")
                if isinstance(index, int) and isinstance(prompt, str):
                    prompts.setdefault(index, prompt)
            if prompts:
                break
        return prompts

    def latents(self, count: int) -> list[int]:
        """Choose indices evenly from those that most rows have, unfinished rows left aside."""
        finished = [row for row in self.rows if not row.failed] or self.rows
        held = [set(self._indices(row)) for row in finished]
        if not held or count < 1:
            return []
        votes = {index: sum(index in have for have in held) for index in set().union(*held)}
        shared = sorted(index for index, number in votes.items() if number == max(votes.values()))
        count = min(count, len(shared))
        return [shared[(2 * place + 1) * len(shared) // (2 * count)] for place in range(count)]

    def grid(self, detail: Detail) -> list[list[Picture]]:
        """Return one line of pictures for each row, the same latents in each column."""
        return [[self._picture(row, index, detail) for index in self.latents(detail.columns)] for row in self.rows]

    def most_changed(self, detail: Detail) -> list[tuple[Row, list[tuple[Picture, Picture]]]]:
        """Return for each method the pairs (untouched, method) that differ most."""
        base = self.results.baseline
        if base is None or base not in self.rows:
            return []
        found = []
        for row in self.rows:
            held = set(self._indices(row))
            shared = [index for index in row.most_changed if index in held][: detail.pairs]
            pairs = [(self._picture(base, index, detail), self._picture(row, index, detail)) for index in shared]
            if row is not base and pairs:
                found.append((row, pairs))
        return found

    def _picture(self, row: Row, index: int, detail: Detail) -> Picture:
        key = (row.cell, index, detail.edge, detail.quality)
        if key not in self._encoded:
            path = self._folder(row) / "images" / f"{index:05d}.png"
            self._encoded[key] = _data_uri(path, detail.edge, detail.quality, *self._clip)
        return Picture(row, index, self.prompts.get(index, f"picture {index}"), self._encoded[key])

    @property
    def _clip(self) -> tuple[int, float]:
        """Frames of each picture, and how many are shown a second."""
        frames, rate = (number(self.results.protocol, key) for key in ("frames", "frame_rate"))
        return max(int(frames or 1), 1), rate or 16.0

    def _folder(self, row: Row) -> Path:
        return self.run_dir / "cells" / row.cell

    def _indices(self, row: Row) -> list[int]:
        if not is_plain_name(row.cell):  # a folder of this run, nothing else
            return []
        files = (self._folder(row) / "images").glob("*.png")
        return sorted(int(file.stem) for file in files if file.stem.isdecimal())


def _manifest(path: Path) -> Iterable[Mapping[str, Any]]:
    """Yield the objects of a JSON Lines file; a missing file or a broken line yields nothing."""
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                if isinstance(record, dict):
                    yield record
    except (OSError, UnicodeDecodeError):
        return


def _data_uri(path: Path, edge: int, quality: int, frames: int, rate: float) -> str | None:
    """Return a WebP data URI of a picture, or None if it cannot be read; a clip moves, with `_SHOWN` frames at most."""
    from PIL import Image

    try:
        with Image.open(path) as source:
            picture = source.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    height, every = picture.height // frames, -(-frames // _SHOWN)
    shown = [
        picture.crop((0, place * height, picture.width, (place + 1) * height)) for place in range(0, frames, every)
    ]
    for frame in shown:
        frame.thumbnail((edge, edge), Image.Resampling.LANCZOS)
    options: dict[str, Any] = {"quality": quality, "method": 4, "use_sharp_yuv": True}
    if frames > 1:
        options |= {"save_all": True, "append_images": shown[1:], "duration": round(1000 * every / rate), "loop": 0}
    stream = io.BytesIO()
    shown[0].save(stream, "WEBP", **options)
    return f"data:image/webp;base64,{base64.b64encode(stream.getvalue()).decode('ascii')}"
