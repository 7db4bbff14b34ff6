"""Untouched compared with patched: images, times, closeness."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from PIL import Image

from elfatt_sd.config import METHODS, UNTOUCHED, PatchConfig, known_method
from elfatt_sd.drawing.pictures import psnr, side_by_side
from elfatt_sd.drawing.running import Shot
from elfatt_sd.drawing.studio import OnStep, Request, Studio, free_name, why_unchanged, write_image
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import find_denoisers
from elfatt_sd.measure import Spread, Turn, busy, interleave, ratios, times_as_fast
from elfatt_sd.patch import patched, remove_patch
from elfatt_sd.runtime.layer import fits

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


COLUMNS = 3  # images in a row of the strip
WORTH = 1.05  # times as fast, in the slowest round, from which on a method is worth using


@dataclass(frozen=True)
class Row:
    """What a method did."""

    method: str  # its name
    picture: Image.Image  # its image
    times: tuple[float, ...]  # seconds from prompt to image, by round
    # how many times as fast as untouched in the same round, or before and after it; 1 for untouched itself
    ratios: tuple[float, ...]
    psnr_db: float  # of its image compared with the untouched one; infinity where they are identical
    unchanged: str = ""  # what to say where they are identical; empty otherwise
    fault: str = ""  # why its image is none; empty otherwise

    @property
    def label(self) -> str:
        """Its name in a caption."""
        return "untouched" if self.method == UNTOUCHED else self.method

    @property
    def seconds(self) -> float:
        """Median over the rounds."""
        return median(self.times)

    @property
    def speed(self) -> float:
        """Median over the rounds of how many times as fast it is."""
        return Spread.over(self.ratios).median

    def speed_text(self) -> str:
        """Return how many times as fast, with minimum and maximum over more than one round."""
        if self.method == UNTOUCHED:
            return ""
        return Spread.over(self.ratios).words()

    def psnr_text(self) -> str:
        """Return how close it is."""
        if self.method == UNTOUCHED:
            return ""
        if self.fault:
            return "no image"
        return f"{self.psnr_db:.1f}" if math.isfinite(self.psnr_db) else "identical"

    def caption(self, busy: bool = False) -> tuple[str, str]:
        """Return its two lines in the strip; a speed only where the machine was idle."""
        name = f"{self.label}, {self.seconds:.2f} s"
        if self.method == UNTOUCHED:
            return name, ""
        close = self.psnr_text() if self.fault or self.unchanged else f"PSNR {self.psnr_text()} dB"
        return name, f"{times_as_fast(self.speed_text(), busy)}, {close}"


@dataclass(frozen=True)
class Drawn:
    """An image that is done, for who shows progress; `fault` as for `Row`."""

    name: str
    picture: Image.Image
    seconds: float
    fault: str

    def summary(self) -> str:
        """Return it for people."""
        return f"{self.name}: {self.seconds:.2f} s"


@dataclass
class Trial:
    """Methods that are tried, and what they did so far."""

    pipe: Any  # a text-to-image pipeline
    request: Request  # its first prompt, and its first seed; its method does not count
    methods: Sequence[str] = METHODS  # names of presets; the untouched pipeline is always the first
    rounds: int = 2  # how often each is drawn; all methods have their turn before the next round
    # draw untouched once more at the end, so that a single round, too, has a ratio to it before and after
    again: bool = False
    warm: bool = False  # all methods ran already, and need no warm-up
    _pictures: dict[str, Image.Image] = field(default_factory=dict)
    _times: dict[str, list[float]] = field(default_factory=dict)
    _faults: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.methods = (UNTOUCHED, *(method for method in self.methods if method != UNTOUCHED))
        self._configs = {method: PatchConfig.preset(known_method(method)) for method in self.methods}
        self._studio = Studio(self.pipe, dataclasses.replace(self.request, num_images=self.images), Path())

    @property
    def images(self) -> int:
        """How many images a whole run draws."""
        return self.rounds * len(self.methods) + self.again

    def run(self, on_step: OnStep) -> Iterator[Drawn]:
        """Draw everything, after a warm-up of two steps for each method; what is drawn is kept if it is stopped."""
        self._studio.on_step = on_step
        remove_patch(self.pipe)
        rounds = interleave(self.methods, self._draw, range(self.rounds))
        again = interleave((UNTOUCHED,), self._draw, (self.rounds,) * self.again)
        for turns in chain(rounds, again):
            for turn, shot in turns:
                if shot.fault and turn.name == UNTOUCHED:
                    raise ElfattError(f"the untouched image {shot.fault}.")
                self._calls, picture = len(self.pipe.scheduler.timesteps), shot.frames[0]
                self._pictures.setdefault(turn.name, picture)
                self._faults[turn.name] = shot.fault and f"the image {shot.fault}"
                self._times.setdefault(turn.name, []).append(shot.seconds)
                label = "untouched" if turn.name == UNTOUCHED else turn.name
                fault = self._faults[turn.name]
                yield Drawn(f"{label}, {self._round(turn.number)}", picture, shot.seconds, fault)

    def _round(self, number: int) -> str:
        return f"round {number + 1} of {self.rounds}" if number < self.rounds else "again"

    def _draw(self, turn: Turn) -> Shot:
        config = self._configs[turn.name]
        with patched(self.pipe, config) if config.active else nullcontext():
            if turn.number == 0 and not self.warm:
                self._studio.warm_up()
            return self._studio.draw(self.request.prompts[0], self.request.seed)

    @property
    def rows(self) -> list[Row]:
        """What each method did that was drawn at least once."""
        return [self._row(method) for method in self._times]

    def _row(self, method: str) -> Row:
        times = self._times[method]
        decibel = psnr(self._pictures[UNTOUCHED], self._pictures[method])
        same = method != UNTOUCHED and not math.isfinite(decibel)
        reason = why_unchanged(self._configs[method], self._calls) if same else ""
        given = self._pictures[method], tuple(times), self._ratios(method), decibel, reason
        return Row(method, *given, self._faults[method])

    def _ratios(self, method: str) -> tuple[float, ...]:
        untouched, times = self._times[UNTOUCHED], self._times[method]
        own = ratios(untouched, times)
        return own if method == UNTOUCHED or not self.again else own + ratios(untouched[1:], times)

    def recommendation(self) -> str:
        """Return in a sentence which method to use here."""
        others = [row for row in self.rows if row.method != UNTOUCHED and not (row.unchanged or row.fault)]
        faster = [row for row in others if min(row.ratios) >= WORTH]
        if not others:
            return "No method changed the image in this run: give more steps, or a larger image."
        if told := self.busy():
            return f"No recommendation: {told}."
        if not faster and any(row.speed >= WORTH for row in others):
            return (
                "No recommendation: no method was faster in every round, as the times vary too much. Close what else "
                "runs on this machine, or give more rounds."
            )
        if not faster:
            return (
                "Leave the pipeline untouched at this size on this machine: no method was faster in every round; "
                "a larger image gains more."
            )
        closest, fastest = max(faster, key=lambda row: row.psnr_db), max(faster, key=lambda row: row.speed)
        text = f"Use {_with_figures(closest)}: the closest to untouched of those that were faster in every round"
        return (
            f"{text}; {_with_figures(fastest)} is the fastest of them."
            if fastest is not closest
            else f"{text}, and the fastest."
        )

    def busy(self) -> str:
        """Return what to say where the times do not count; empty otherwise."""
        return busy(row.times for row in self.rows)

    def write(self, folder: Path) -> Path:
        """Write the strip as PNG, and a JSON file next to it, and return the path of the strip."""
        rows, prompt, told = self.rows, self.request.prompts[0], bool(self.busy())
        strip = side_by_side([row.picture for row in rows], [row.caption(told) for row in rows], prompt, COLUMNS)
        return write_image(free_name(folder, prompt), strip, self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        record = self._studio.record(self.request.prompts[0], self.request.seed, self._pictures[UNTOUCHED])
        kept = {name: value for name, value in record.items() if name not in ("method", "config", "autotune")}
        rows = [
            {
                "method": row.method,
                "seconds": list(row.times),
                "speed_ratios": list(row.ratios),
                "psnr_db": row.psnr_db if math.isfinite(row.psnr_db) and not row.fault else None,
                "identical": bool(row.unchanged),
                "config": self._configs[row.method].to_dict(),
            }
            for row in self.rows
        ]
        return kept | {"rounds": self.rounds, "methods": rows, "recommendation": self.recommendation()}


def try_methods(pipe: Any, prompt: str, *, methods: Sequence[str] = METHODS, rounds: int = 2, **settings: Any) -> Trial:
    """Draw one prompt with every method from one seed.

    Args:
        pipe: a text-to-image pipeline; it has no patch afterwards.
        prompt: what is drawn.
        methods: names of presets; the untouched pipeline is always the first.
        rounds: how often each is timed, interleaved.
        **settings: fields of `Request`, such as `steps`, `guidance`, `seed`, `height` and `width`.

    Returns:
        Its `rows`, `recommendation()`, and `write(folder)` for the strip.

    Raises:
        ElfattError: the pipeline cannot do what is asked for.
    """
    trial = Trial(pipe, Request((prompt,), PatchConfig.preset(UNTOUCHED), **settings), methods, rounds)
    for _ in trial.run(lambda step, steps: None):
        pass
    return trial


def _with_figures(row: Row) -> str:
    return f"{row.method} ({row.speed:.2f} times as fast, PSNR {row.psnr_db:.1f} dB)"
