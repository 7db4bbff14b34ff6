"""Untouched compared with patched: images, times, closeness."""

from __future__ import annotations

import gc
import itertools
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFont

from elfatt_sd import errors as checks
from elfatt_sd.config import METHODS, UNTOUCHED, PatchConfig, is_auto, method_named
from elfatt_sd.drawing.studio import OnImage, OnStep, Request, Result, Shot, Studio, free_name, write_image
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import find_denoisers
from elfatt_sd.measure import Comparison, Turn, ratios, student_quantile, times_as_fast
from elfatt_sd.measure import busy as busy_of
from elfatt_sd.patch import decided, remove_patch
from elfatt_sd.runtime.layer import fits, resolve

LEAST = 20.0  # dB: unrelated images have 10 to 20
WORTH = 1.05  # times as fast, in the slowest round, from which on a method is worth using
TITLE = "elfatt-sd: the same prompt and seed, untouched, with the fastest and with the closest method"
BUSY_TITLE = "the machine was busy: do not trust the speeds"
INK, FAINT, PAPER = (24, 24, 27), (96, 96, 104), (255, 255, 255)
MARGIN = 16  # pixels around everything
BRIGHTER = 10  # times, so that small differences are seen


def side_by_side(
    pictures: Sequence[Image.Image], captions: Sequence[tuple[str, str]], title: str = "", columns: int | None = None
) -> Image.Image:
    """Put images in rows, each above its caption, pixel for pixel; what is too long for its place is shortened."""
    size = max(13, min(picture.width for picture in pictures) // 19)
    font, small = ImageFont.load_default(size * 1.1), ImageFont.load_default(size * 0.95)
    columns = min(columns or len(pictures), len(pictures))
    width, height = (max(side) for side in zip(*(picture.size for picture in pictures), strict=True))
    sheet_width, cell = columns * (width + MARGIN) + MARGIN, (width, height + MARGIN // 2 + round(size * 3.0))
    letters = round((sheet_width - 2 * MARGIN) / font.getlength("n"))
    lines = textwrap.wrap(title, letters, max_lines=2, placeholder=" …")  # all is in the file's settings
    top = MARGIN + (len(lines) * round(size * 1.5) + MARGIN // 2 if lines else 0)
    sheet = Image.new("RGB", (sheet_width, top + -(-len(pictures) // columns) * (cell[1] + MARGIN)), PAPER)
    for number, line in enumerate(lines):
        ImageDraw.Draw(sheet).text((MARGIN, MARGIN + number * round(size * 1.5)), line, INK, font)
    sheet.paste(PAPER, (sheet_width - MARGIN, 0, sheet_width, top))
    for number, (picture, (name, details)) in enumerate(zip(pictures, captions, strict=True)):
        own, below = Image.new("RGB", cell, PAPER), picture.height + MARGIN // 2
        own.paste(picture.convert("RGB"))
        ImageDraw.Draw(own).text((0, below), _fitted(name, font, width), INK, font)
        ImageDraw.Draw(own).text((0, below + round(size * 1.55)), _fitted(details, small, width), FAINT, small)
        row, column = divmod(number, columns)
        sheet.paste(own, (MARGIN + column * (width + MARGIN), top + row * (cell[1] + MARGIN)))
    return sheet


def _fitted(text: str, font: Any, width: int) -> str:
    """Shorten a line to its place, with a sign that it goes on."""
    kept = text
    while kept and font.getlength(kept if kept == text else f"{kept}…") > width:
        kept = kept[:-1]
    return kept if kept == text else f"{kept}…"


def psnr(first: Image.Image, second: Image.Image) -> float:
    """Return the peak signal-to-noise ratio of two images of one size in dB, `10 log10(255^2 / mean squared error)`."""
    one, two = (np.asarray(picture.convert("RGB"), dtype=np.float64) for picture in (first, second))
    error = float(np.mean((one - two) ** 2))
    return float("inf") if error == 0 else float(10 * np.log10(255**2 / error))


def difference(first: Image.Image, second: Image.Image) -> Image.Image:
    """Return how far two images of one size are apart in each pixel, `BRIGHTER` times as bright."""
    apart = ImageChops.difference(first.convert("RGB"), second.convert("RGB"))
    return apart.point(lambda value: min(255, BRIGHTER * value))


@dataclass(frozen=True)
class MethodResult:
    method: str  # its name
    picture: Image.Image  # its image
    times: tuple[float, ...]  # seconds from prompt to image, by round
    # how many times as fast as untouched in the same round, or before and after it; 1 for untouched itself
    ratios: tuple[float, ...]
    psnr_db: float  # of its image compared with the untouched one; infinity where they are identical
    unchanged: str = ""  # what to say where they are identical; empty otherwise
    fault: str = ""  # what is wrong with its image; see `studio.fault_of`

    @property
    def speed(self) -> float:
        return median(self.ratios)

    @property
    def usable(self) -> bool:
        return self.method != UNTOUCHED and not (self.unchanged or self.fault)

    @property
    def closeness(self) -> str:
        return "no image" if self.fault else "identical" if self.unchanged else f"PSNR {self.psnr_db:.1f} dB"

    def caption(self, busy: bool = False) -> tuple[str, str]:
        """Return its two lines below its image; a speed only where the machine was idle."""
        seconds = f"{median(self.times):.2f} s"
        if self.method == UNTOUCHED:
            return f"untouched, {seconds}", ""
        return f"{self.method}, {seconds}", f"{times_as_fast(self.ratios, busy)}, {self.closeness}"


class Pair(NamedTuple):  # as a page shows it
    label: str  # what was drawn
    untouched: MethodResult
    own: MethodResult
    busy: bool  # whether the speed is not to be trusted


@dataclass(eq=False)
class Trial:
    """Untouched and other methods from one prompt and seed, and what they did so far.

    With `again`, untouched is drawn once more at the end: a single round, too, has a ratio to it before and after.
    """

    studio: Studio
    methods: Sequence[str | PatchConfig] = METHODS
    repeats: int = 2
    again: bool = False
    shot: tuple[str, int] | None = None  # prompt and seed; by default the studio's first

    def __post_init__(self) -> None:
        self.prompt, self.seed = self.shot or next(self.studio.shots())
        self.configs: dict[str, PatchConfig] = {UNTOUCHED: PatchConfig.preset(UNTOUCHED)}
        for method in self.methods:
            size = self.studio.request.height, self.studio.request.width, None
            config = decided(self.studio.pipe, resolve(method, {}), (), size, self.studio.steps)
            if [*self.methods] == [*METHODS] and not fits(config, find_denoisers(self.studio.pipe)):
                continue  # of all presets, those that the model can have
            if self.configs.get(config.method, config) != config:  # such as two files that were saved from one method
                own = method if isinstance(method, str) else "with settings"
                config = replace(config, method=f"{config.method}, {own}")
            self.configs[config.method] = config
        self.comparison = Comparison(list(self.configs), self._take, self.repeats)
        self.times = self.comparison.times
        self.shots: dict[str, Shot] = {}  # the first one of each method, or the one that is no image
        self.images = self.repeats * len(self.configs) + self.again  # of a whole run

    def warm_up(self) -> None:
        """Run two steps of each method, so that no time has a first call in it."""
        for config in self.configs.values():
            with self.studio.patched(config):
                self.studio.warm_up()

    def run(self, on_image: OnImage = lambda *_: None, on_step: OnStep | None = None, *, warm_up: bool = True) -> None:
        """Draw everything in interleaved rounds; what is drawn is kept if it is stopped."""
        self._on_image, self.studio.on_step = on_image, on_step or self.studio.on_step
        remove_patch(self.studio.pipe)
        if warm_up:
            self.warm_up()
        self.comparison.run()
        if self.again:
            self.times[UNTOUCHED].append(self._take(Turn(UNTOUCHED, self.repeats, 1)))

    def _take(self, turn: Turn) -> float:
        shot = self.draw(turn.name)
        if shot.fault and turn.name == UNTOUCHED:
            raise ElfattError(f"the untouched image {shot.fault}.")
        which = f"round {turn.number + 1} of {self.repeats}" if turn.number < self.repeats else "again"
        name = f"{'untouched' if turn.name == UNTOUCHED else turn.name}, {which}"
        self._on_image(f"{name}: {shot.seconds:.2f} s", shot.fault and f"{name}: the image {shot.fault}")
        return shot.seconds

    def draw(self, method: str) -> Shot:
        with self.studio.patched(self.configs[method]):
            shot = self.studio.draw(self.prompt, self.seed)
        if method not in self.shots or (shot.fault and method != UNTOUCHED):
            self.shots[method] = shot
        return shot

    @property
    def rows(self) -> list[MethodResult]:
        """What each method did that was drawn at least once."""
        rows, untouched = list[MethodResult](), self.times[UNTOUCHED]
        for method, times in self.times.items():
            if not times:
                continue
            shot, own, unchanged = self.shots[method], ratios(untouched, times), ""
            if self.again and method != UNTOUCHED:
                own += ratios(untouched[1:], times)
            decibel = psnr(self.shots[UNTOUCHED].frames[0], shot.frames[0])
            if method != UNTOUCHED and not math.isfinite(decibel):
                unchanged = f"identical: {method} changed nothing in this run"
                if not self.configs[method].approximates(0, len(self.studio.pipe.scheduler.timesteps)):
                    unchanged += ", of which it approximates no step; give more steps"
            rows.append(MethodResult(method, shot.frames[0], tuple(times), own, decibel, unchanged, shot.fault))
        return rows

    def recommendation(self) -> str:
        """Return in a sentence which method to use here."""
        usable = [row for row in self.rows if row.usable]
        faster = [row for row in usable if min(row.ratios) >= WORTH]
        if not usable and all(self.times.values()):
            return "No method changed the image in this run: give more steps, or a larger image."
        few = "one run of each says little; give more repeats" * (min(map(len, self.times.values())) + self.again < 2)
        if said := self.comparison.busy() or few:
            return f"No recommendation: {said}."
        if not faster:
            return (
                "Leave the pipeline untouched at this size on this machine: no method was faster in every round. "
                "Where the times vary, give more repeats; a larger image gains more."
            )
        closest, fastest = max(faster, key=lambda row: row.psnr_db), max(faster, key=lambda row: row.speed)
        first, second = (
            f"{row.method} ({row.speed:.2f} times as fast, PSNR {row.psnr_db:.1f} dB)" for row in (closest, fastest)
        )
        text = f"Use {first}: the closest to untouched of those that were faster in every round"
        return f"{text}, and the fastest." if fastest is closest else f"{text}; {second} is the fastest."

    def write(self, folder: Path) -> Path:
        """Write the strip as PNG, and a JSON file next to it, and return the path of the strip."""
        rows, busy = self.rows, bool(self.comparison.busy())
        strip = side_by_side([row.picture for row in rows], [row.caption(busy) for row in rows], self.prompt, 3)
        return write_image(free_name(folder, self.prompt), strip, self.to_dict())

    def pairs(self) -> list[Pair]:
        untouched, *others = self.rows
        return [Pair(self.prompt, untouched, row, bool(self.comparison.busy())) for row in others]

    def figures(self) -> list[str]:
        """Return a line for each method, and the recommendation."""
        busy = bool(self.comparison.busy())
        return [", ".join(filter(None, row.caption(busy))) for row in self.rows] + [self.recommendation()]

    def to_dict(self) -> dict[str, Any]:
        record = self.studio.record(self.prompt, self.seed, self.shots[UNTOUCHED])
        of_one = ("method", "config", "autotune", "seconds", "peak_memory_bytes", "peak_memory")
        rows = [
            {
                "method": row.method,
                "seconds": list(row.times),
                "speed_ratios": list(row.ratios),
                "psnr_db": row.psnr_db if math.isfinite(row.psnr_db) and not row.fault else None,
                "identical": bool(row.unchanged),
                "config": self.configs[row.method].to_dict(origin=True),
            }
            for row in self.rows
        ]
        kept = {name: value for name, value in record.items() if name not in of_one}
        return kept | {"repeats": self.repeats, "methods": rows, "recommendation": self.recommendation()}


def try_methods(
    pipe: Any, prompt: str, *, methods: Sequence[str] = METHODS, repeats: int = 2, **settings: Any
) -> Trial:
    """Draw one prompt with every method from one seed.

    Args:
        pipe: a text-to-image pipeline; it has no patch afterwards.
        prompt: what is drawn.
        methods: names of presets; the untouched pipeline is always the first.
        repeats: how often each is timed, interleaved.
        **settings: fields of `Request`, such as `steps`, `guidance`, `seed`, `height` and `width`.

    Returns:
        Its `rows`, `recommendation()`, and `write(folder)` for the strip.

    Raises:
        ElfattError: the pipeline cannot do what is asked for.
    """
    checks.whole("repeats", repeats, 1)
    trial = Trial(Studio(pipe, Request((prompt,), PatchConfig.preset(UNTOUCHED), **settings), Path()), methods, repeats)
    trial.run()
    return trial


def compared(studio: Studio) -> Iterator[Result]:
    """Draw and write each patched image between two untouched ones: its own, and the next one's or its own again."""
    trials = (Trial(studio, [studio.request.config], 1, again=True, shot=shot) for shot in studio.shots())
    trial = next(trials)
    trial.warm_up()
    before = trial.draw(UNTOUCHED).seconds
    for following in itertools.chain(trials, [None]):
        *_, method = trial.configs
        shot = trial.draw(method)
        after = (following or trial).draw(UNTOUCHED).seconds
        trial.times.update({UNTOUCHED: [before, after], method: [shot.seconds]})
        untouched, own, figures, fault = pair(trial)
        busy = bool(trial.comparison.busy())
        images = [untouched.picture, own.picture, difference(untouched.picture, own.picture)]
        captions = [untouched.caption(), own.caption(busy), ("difference", f"{BRIGHTER} times as bright")]
        record = studio.record(trial.prompt, trial.seed, shot) | {
            "untouched_seconds": mean(untouched.times),
            "speed_ratio": mean(own.ratios),
            "speed_ratios": list(own.ratios),
            "psnr_db": own.psnr_db if own.usable else None,
            "identical": bool(own.unchanged and not own.fault),
            "timing": "one run between two untouched ones, after a warm-up of two steps",
        }
        path = write_image(free_name(studio.folder, trial.prompt), side_by_side(images, captions, trial.prompt), record)
        shown = Pair(f"{trial.prompt} (seed {trial.seed})", untouched, own, busy)
        yield Result(path, shot.seconds, studio.memory(shot), fault, figures, record["psnr_db"], shown)
        trial, before = following or trial, after


def pair(trial: Trial) -> tuple[MethodResult, MethodResult, str, str]:
    """Return untouched and the one method of a trial, how fast and how close it is, and what is wrong with an image."""
    untouched, own = trial.rows
    figures = f"untouched {mean(untouched.times):.2f} s, patched {median(own.times):.2f} s"
    if found := untouched.fault or own.fault:
        fault = f"the {'untouched' if untouched.fault else 'patched'} image {found}"
        return untouched, replace(own, fault=found), f"not compared ({figures})", fault
    if own.unchanged:
        return untouched, own, f"{own.unchanged} ({figures})", ""
    figures += f": {times_as_fast(own.ratios)} (between two untouched runs, after a warm-up); {own.closeness}"
    said = trial.comparison.busy()
    return untouched, own, f"{figures}\n  {said}" if said else figures, ""


def closeness(decibel: Sequence[float]) -> str:
    """Say how close images are, without those that are identical; of one image there is no mean."""
    if not decibel:
        return "identical"
    if len(decibel) == 1:
        return f"PSNR {decibel[0]:.1f} dB"
    middle, count = mean(decibel), len(decibel)
    half = student_quantile(0.975, count - 1) * stdev(decibel) / math.sqrt(count)
    interval = f" (95 % interval {middle - half:.1f} to {middle + half:.1f})" * (count >= 8)  # fewer say too little
    return f"PSNR in dB: {middle:.1f} on average{interval}, lowest {min(decibel):.1f}, of {count} images"


@dataclass
class Sheet:
    """Prompts drawn with each pipeline; which methods are fastest and closest is measured on the first prompt."""

    load: Callable[[Request], Any]
    models: Sequence[str]
    prompts: Sequence[str]
    methods: Sequence[str] = METHODS
    repeats: int = 1
    settings: dict[str, Any] = field(default_factory=dict)  # further fields of `Request`
    # finished, each of one prompt and pipeline: what is shown of its methods, and the record of its trial
    rows: list[tuple[list[MethodResult], dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.again, first = self.repeats == 1, len({UNTOUCHED, *self.methods})
        tried = [first, *[min(3, first)] * (len(self.prompts) - 1)]
        self.images = len(self.models) * sum(self.repeats * each + self.again for each in tried)  # at most

    def run(self, on_image: OnImage, on_step: OnStep) -> None:
        untouched = PatchConfig.preset(UNTOUCHED)
        for model in self.models:
            pipe = self.load(Request(tuple(self.prompts), untouched, model=model, **self.settings))
            denoisers, methods = find_denoisers(pipe), list[str | PatchConfig](self.methods)
            if len(self.models) > 1 or methods == [*METHODS]:  # tokens of transformers cannot be merged
                methods = [name for name in methods if is_auto(own := method_named(name)) or fits(own, denoisers)]
            for number, prompt in enumerate(self.prompts):
                studio = Studio(pipe, Request((prompt,), untouched, model=model, **self.settings), Path(), on_step)
                trial = Trial(studio, methods, self.repeats, again=self.again)

                def tell(said: str, fault: str, begin: str = f"{model}, {prompt}: ") -> None:
                    on_image(begin + said, fault and begin + fault)

                trial.run(tell, warm_up=number == 0)
                rows = trial.rows if number else chosen(trial.rows)
                methods = [trial.configs[row.method] for row in rows]
                self.rows.append((rows, trial.to_dict()))
            del denoisers, pipe, studio, trial
            gc.collect()  # before another model is loaded

    def by_method(self) -> dict[tuple[str, str], list[MethodResult]]:
        """Return what each method did with all prompts, by pipeline and method."""
        found: dict[tuple[str, str], list[MethodResult]] = {}
        for row, record in ((row, record) for rows, record in self.rows for row in rows):
            found.setdefault((record["model"], row.method), []).append(row)
        return found

    @property
    def busy(self) -> str:
        """What to say of the speeds where the machine was busy; empty otherwise."""
        return busy_of([seconds for row in rows for seconds in row.times] for rows in self.by_method().values())

    def pairs(self) -> list[Pair]:
        drawn = [(f"{record['model']}, {record['prompt']}", rows) for rows, record in self.rows]
        return [Pair(label, rows[0], row, bool(self.busy)) for label, rows in drawn for row in rows[1:]]

    def figures(self) -> list[str]:
        """Return lines with the figures of each pipeline and method."""
        said, found = list[str](), self.by_method()
        for (model, method), rows in found.items():
            rows = [row for row in rows if not row.fault]
            speed = times_as_fast([ratio for row in rows for ratio in row.ratios], self.busy)
            close = [row.psnr_db for row in rows if math.isfinite(row.psnr_db)]
            if method != UNTOUCHED:
                said.append(f"{model}, {method}: {speed}, {closeness(close)}")
            elif [each for each, _ in found].count(model) == 1:
                said.append(f"{model}: no method changed the image and kept {LEAST:g} dB PSNR to the untouched one")
        return [*said, *filter(None, [self.busy])]

    def write(self, folder: Path) -> Path:
        """Write the sheet as PNG, and a JSON file next to it, and return the path of the sheet."""
        columns, busy = max(len(rows) for rows, _ in self.rows), bool(self.busy)
        size = max(rows[0].picture.size for rows, _ in self.rows)
        blank = Image.new("RGB", size, "white")  # where no method made another image of its own
        images, captions = list[Image.Image](), list[tuple[str, str]]()
        for rows, record in self.rows:
            missing = columns - len(rows)
            images += [row.picture.resize(size) for row in rows] + [blank] * missing
            captions.append((f"{record['model']}, {rows[0].caption()[0]}", record["prompt"]))
            for row in rows[1:]:  # whose place promises a method that is faster
                name, details = row.caption(busy)
                captions.append((name, details if busy or row.speed > 1 else f"not faster: {details}"))
            captions += [("", "")] * missing
        sheet = side_by_side(images, captions, f"{TITLE}; {BUSY_TITLE}" if busy else TITLE, columns)
        drawn = "one image each between two untouched ones" if self.again else f"{self.repeats} interleaved rounds"
        record = {"trials": [each for _, each in self.rows], "timing": f"{drawn}, after a warm-up of two steps"}
        return write_image(free_name(folder, "demo sheet"), sheet, record)


def chosen(rows: Sequence[MethodResult]) -> list[MethodResult]:
    """Return untouched, the fastest and the closest of the methods that were faster; the fastest alone if none was.

    A method that changed nothing, or made another image of it, below `LEAST` dB, has no place among them.
    """
    usable = [row for row in rows if row.usable and row.psnr_db >= LEAST]
    if not usable:
        return [rows[0]]
    fastest = max(usable, key=lambda row: row.speed)
    closest = max((row for row in usable if row.speed > 1), key=lambda row: row.psnr_db, default=fastest)
    return [rows[0], fastest] + [closest] * (closest is not fastest)
