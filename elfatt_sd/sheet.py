"""A sheet of several prompts and pipelines: untouched, the fastest method and the closest one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from PIL import Image

from elfatt_sd.choosing import fits
from elfatt_sd.config import PatchConfig
from elfatt_sd.families import find_denoisers
from elfatt_sd.generation import OnStep, free_name, write_image
from elfatt_sd.measuring.clock import Spread, busy, times_as_fast
from elfatt_sd.pictures import side_by_side
from elfatt_sd.presets import METHODS, UNTOUCHED, known_method
from elfatt_sd.request import Request
from elfatt_sd.trial import Drawn, Row, Trial

LEAST = 20.0  # dB: unrelated images have 10 to 20
TITLE = "elfatt-sd: the same prompt and seed, untouched, with the fastest and with the closest method"
BUSY_TITLE = "the machine was busy: the speeds, and which method is the fastest, are not to be trusted"


@dataclass(frozen=True)
class Line:
    """A row of the sheet: one prompt with one pipeline."""

    model: str  # name of the pipeline
    prompt: str  # what is drawn
    rows: tuple[Row, ...]  # untouched, fastest and closest, as far as these are different and faster than untouched


class Sheet:
    """Prompts drawn with each pipeline; which methods are fastest and closest is measured on the first prompt.

    The closest method is the one of the highest PSNR to the untouched image, among those that were faster.
    """

    def __init__(
        self,
        load: Callable[[Request], Any],
        models: Sequence[str],
        prompts: Sequence[str],
        methods: Sequence[str] = METHODS,
        rounds: int = 1,
        **settings: Any,
    ) -> None:
        self._load, self._models, self._prompts, self._methods = load, models, prompts, methods
        self._rounds, self._again, self._settings = rounds, rounds == 1, settings
        self.lines: list[Line] = []
        tried = [len({UNTOUCHED, *methods}), *[min(3, len({UNTOUCHED, *methods}))] * (len(prompts) - 1)]
        self.images = len(models) * sum(rounds * each + self._again for each in tried)  # at most
        self._records: list[dict[str, Any]] = []

    def run(self, on_step: OnStep) -> Iterator[Drawn]:
        """Draw everything, and yield each image."""
        for model in self._models:
            pipe = self._load(Request(tuple(self._prompts), PatchConfig.preset("sd"), model=model, **self._settings))
            denoisers = find_denoisers(pipe)  # tokens of transformers cannot be merged
            methods = [method for method in self._methods if fits(PatchConfig.preset(known_method(method)), denoisers)]
            for number, prompt in enumerate(self._prompts):
                request = Request((prompt,), PatchConfig.preset("sd"), model=model, **self._settings)
                first = number == 0
                trial = Trial(pipe, request, methods, self._rounds, self._again, warm=not first)
                for drawn in trial.run(on_step):
                    name = drawn.name.removesuffix(", round 1 of 1")
                    yield dataclasses.replace(drawn, name=f"{model}, {prompt}: {name}")
                rows = chosen(trial.rows) if first else trial.rows
                methods = [row.method for row in rows]
                self.lines.append(Line(model, prompt, tuple(rows)))
                self._records.append(trial.to_dict())

    def write(self, folder: Path) -> Path:
        """Write the sheet as PNG, and a JSON file next to it, and return the path of the sheet."""
        columns = max(len(line.rows) for line in self.lines)
        cells = [(line, row) for line in self.lines for row in (*line.rows, *[None] * (columns - len(line.rows)))]
        size = max(line.rows[0].picture.size for line in self.lines)
        blank = Image.new("RGB", size, "white")
        images = [blank if row is None else row.picture.resize(size) for _, row in cells]
        told = {model: bool(self.busy(model)) for model in self._models}
        captions = [("", "") if row is None else caption(line, row, told[line.model]) for line, row in cells]
        title = f"{TITLE}; {BUSY_TITLE}" if any(told.values()) else TITLE
        sheet = side_by_side(images, captions, title, columns)
        return write_image(free_name(folder, "demo sheet"), sheet, {"trials": self._records, "timing": self._timing})

    def summary(self) -> Iterator[str]:
        """Yield a line for each method of each pipeline: how many times as fast, and how close."""
        for model in self._models:
            for method, rows in self._rows(model).items():
                if method == UNTOUCHED:
                    continue
                speed = Spread.over([ratio for row in rows for ratio in row.ratios]).words()
                close = [row.psnr_db for row in rows if math.isfinite(row.psnr_db)]
                psnr = f"PSNR {median(close):.1f} dB" if close else "identical"
                yield f"{model}, {method}: {speed} times as fast, {psnr} (median of {len(rows)} prompts)"
            if told := self.busy(model):
                yield f"{model}: {told}"

    def busy(self, model: str) -> str:
        return busy([second for row in rows for second in row.times] for rows in self._rows(model).values())

    def _rows(self, model: str) -> dict[str, list[Row]]:
        rows = [row for line in self.lines if line.model == model for row in line.rows]
        return {name: [row for row in rows if row.method == name] for name in dict.fromkeys(row.method for row in rows)}

    @property
    def _timing(self) -> str:
        drawn = "one image each between two untouched ones" if self._again else f"{self._rounds} interleaved rounds"
        return f"{drawn}, after a warm-up of two steps"


def chosen(rows: Sequence[Row]) -> list[Row]:
    """Return untouched, the fastest and the closest of the methods that were faster than it and changed the image.

    A method that has made another image of it, below `LEAST` dB, has no place among them.
    """
    untouched, *others = rows
    faster = [row for row in others if row.speed > 1 and not (row.unchanged or row.fault) and row.psnr_db >= LEAST]
    if not faster:
        return [untouched]
    fastest, closest = max(faster, key=lambda row: row.speed), max(faster, key=lambda row: row.psnr_db)
    return [untouched, fastest] + ([closest] if closest is not fastest else [])


def caption(line: Line, row: Row, busy: bool = False) -> tuple[str, str]:
    if row.method == UNTOUCHED:
        return f"{line.model}, untouched", line.prompt
    return row.label, f"{times_as_fast(f'{row.speed:.2f}', busy)}, PSNR {row.psnr_text()} dB"
