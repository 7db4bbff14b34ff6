"""Untouched compared with patched: images, times, closeness."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from PIL import Image

from elfatt_sd.config import METHODS, UNTOUCHED, PatchConfig, known_method
from elfatt_sd.drawing.pictures import psnr, side_by_side
from elfatt_sd.drawing.running import Shot
from elfatt_sd.drawing.studio import OnImage, OnStep, Request, Result, Studio, free_name, write_image
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import find_denoisers
from elfatt_sd.measure import Comparison, Spread, Turn, busy, ratios
from elfatt_sd.patch import remove_patch
from elfatt_sd.runtime.layer import fits

LEAST = 20.0  # dB: unrelated images have 10 to 20
COLUMNS = 3  # images in a row of the strip
WORTH = 1.05  # times as fast, in the slowest round, from which on a method is worth using
TITLE = "elfatt-sd: the same prompt and seed, untouched, with the fastest and with the closest method"
BUSY_TITLE = "the machine was busy: the speeds, and which method is the fastest, are not to be trusted"


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
    fault: str = ""  # what is wrong with its image; see `pictures.fault_of`

    @property
    def label(self) -> str:
        return "untouched" if self.method == UNTOUCHED else self.method

    @property
    def seconds(self) -> float:
        return median(self.times)

    @property
    def speed(self) -> float:
        return median(self.ratios)

    @property
    def usable(self) -> bool:
        return self.method != UNTOUCHED and not (self.unchanged or self.fault)

    def speed_text(self) -> str:
        """Return how many times as fast, with minimum and maximum over more than one round."""
        return "" if self.method == UNTOUCHED else Spread.over(self.ratios).words()

    def psnr_text(self) -> str:
        if self.fault:
            return "no image"
        if self.method == UNTOUCHED:
            return ""
        return f"{self.psnr_db:.1f}" if math.isfinite(self.psnr_db) else "identical"

    def caption(self, busy: bool = False) -> tuple[str, str]:
        """Return its two lines below its image; a speed only where the machine was idle."""
        name = f"{self.label}, {self.seconds:.2f} s"
        if self.method == UNTOUCHED:
            return name, ""
        close = f"PSNR {self.psnr_text()} dB" if self.usable else self.psnr_text()
        speed = "machine busy, speed unknown" if busy else f"{self.speed_text()} times as fast"
        return name, f"{speed}, {close}"


class Trial:
    """Untouched and other methods from one prompt and seed, and what they did so far.

    With `again`, untouched is drawn once more at the end: a single round, too, has a ratio to it before and after.
    """

    def __init__(
        self,
        studio: Studio,
        methods: Sequence[str | PatchConfig] = METHODS,
        rounds: int = 2,
        *,
        again: bool = False,
        shot: tuple[str, int] | None = None,  # prompt and seed; by default the studio's first
    ) -> None:
        self.studio, self.rounds, self.again = studio, rounds, again
        self.prompt, self.seed = shot or next(studio.shots())
        self.configs: dict[str, PatchConfig] = {UNTOUCHED: PatchConfig.preset(UNTOUCHED)}
        for method in methods:
            config = method if isinstance(method, PatchConfig) else PatchConfig.preset(known_method(method))
            if config.active and config.method == UNTOUCHED:
                config = config.renamed("sd with settings")
            self.configs[config.method] = config
        self.comparison = Comparison(list(self.configs), self._take, rounds)
        self.times = self.comparison.times
        self.shots: dict[str, Shot] = {}  # the first one of each method, or the one that is no image
        self.images = rounds * len(self.configs) + again  # of a whole run
        self._on_image: OnImage = lambda said, fault: None

    def warm_up(self) -> None:
        """Run two steps of each method, so that no time has a first call in it."""

        def take(turn: Turn) -> float:
            with self._patched(turn.name):
                self.studio.warm_up()
            return 0.0

        self.comparison.warm_up(take)

    def run(self, on_image: OnImage = lambda said, fault: None, warm_up: bool = True) -> None:
        """Draw everything in interleaved rounds; what is drawn is kept if it is stopped."""
        self._on_image = on_image
        remove_patch(self.studio.pipe)
        if warm_up:
            self.warm_up()
        self.comparison.run()
        if self.again:
            self.times[UNTOUCHED].append(self._take(Turn(UNTOUCHED, self.rounds, 1)))

    def _take(self, turn: Turn) -> float:
        shot = self.draw(turn.name)
        if shot.fault and turn.name == UNTOUCHED:
            raise ElfattError(f"the untouched image {shot.fault}.")
        which = f"round {turn.number + 1} of {self.rounds}" if turn.number < self.rounds else "again"
        name = f"{'untouched' if turn.name == UNTOUCHED else turn.name}, {which}"
        self._on_image(f"{name}: {shot.seconds:.2f} s", shot.fault and f"{name}: the image {shot.fault}")
        return shot.seconds

    def draw(self, method: str) -> Shot:
        with self._patched(method):
            shot = self.studio.draw(self.prompt, self.seed)
        if method not in self.shots or (shot.fault and method != UNTOUCHED):
            self.shots[method] = shot
        return shot

    def _patched(self, method: str) -> AbstractContextManager[None]:
        config = self.configs[method]
        return self.studio.patched(config) if config.active else nullcontext()

    @property
    def rows(self) -> list[Row]:
        """What each method did that was drawn at least once."""
        return [self._row(method) for method, times in self.times.items() if times]

    def _row(self, method: str) -> Row:
        shot, untouched, times = self.shots[method], self.times[UNTOUCHED], self.times[method]
        picture, unchanged = shot.frames[0], ""
        own = ratios(untouched, times)
        if self.again and method != UNTOUCHED:
            own += ratios(untouched[1:], times)
        decibel = psnr(self.shots[UNTOUCHED].frames[0], picture)
        if method != UNTOUCHED and not math.isfinite(decibel):
            unchanged = f"identical: {method} changed nothing in this run"
            if not self.configs[method].approximates(0, len(self.studio.pipe.scheduler.timesteps)):
                unchanged += ", of which it approximates no step; give more steps"
        return Row(method, picture, tuple(times), own, decibel, unchanged, shot.fault)

    def recommendation(self) -> str:
        """Return in a sentence which method to use here."""
        usable = [row for row in self.rows if row.usable]
        faster = [row for row in usable if min(row.ratios) >= WORTH]
        if not usable:
            return "No method changed the image in this run: give more steps, or a larger image."
        if said := self.comparison.busy():
            return f"No recommendation: {said}."
        if not faster:
            return (
                "Leave the pipeline untouched at this size on this machine: no method was faster in every round. "
                "Where the times vary, give more rounds; a larger image gains more."
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
        strip = side_by_side([row.picture for row in rows], [row.caption(busy) for row in rows], self.prompt, COLUMNS)
        return write_image(free_name(folder, self.prompt), strip, self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        record = self.studio.record(self.prompt, self.seed, self.shots[UNTOUCHED])
        of_one = ("method", "config", "autotune", "seconds", "peak_memory_bytes", "peak_memory")
        rows = [
            {
                "method": row.method,
                "seconds": list(row.times),
                "speed_ratios": list(row.ratios),
                "psnr_db": row.psnr_db if math.isfinite(row.psnr_db) and not row.fault else None,
                "identical": bool(row.unchanged),
                "config": self.configs[row.method].to_dict(),
            }
            for row in self.rows
        ]
        kept = {name: value for name, value in record.items() if name not in of_one}
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
    request = Request((prompt,), PatchConfig.preset(UNTOUCHED), **settings)
    trial = Trial(Studio(pipe, request, Path()), methods, rounds)
    trial.run()
    return trial


def compared(studio: Studio) -> Iterator[Result]:
    """Draw and write each patched image between two untouched ones: its own, and the next one's or its own again."""
    trials = (Trial(studio, [studio.request.config], 1, again=True, shot=shot) for shot in studio.shots())
    first = next(trials)
    first.warm_up()
    *_, method = first.configs
    first.times[UNTOUCHED].append(first.draw(UNTOUCHED).seconds)
    trial: Trial | None = first
    while trial:
        trial.times[method].append(trial.draw(method).seconds)
        following = next(trials, None)
        after = (following or trial).draw(UNTOUCHED).seconds
        trial.times[UNTOUCHED].append(after)
        if following:
            following.times[UNTOUCHED].append(after)
        yield _written(trial)
        trial = following


def pair(trial: Trial) -> tuple[Row, Row, str, str]:
    """Return untouched and the one method of a trial, how fast and how close it is, and what is wrong with an image."""
    untouched, own = trial.rows
    figures = f"untouched {mean(untouched.times):.2f} s, patched {own.seconds:.2f} s"
    if found := untouched.fault or own.fault:
        fault = f"the {'untouched' if untouched.fault else 'patched'} image {found}"
        return untouched, replace(own, fault=found), f"not compared ({figures})", fault
    if own.unchanged:
        return untouched, own, f"{own.unchanged} ({figures})", ""
    figures += f": {own.speed_text()} times as fast (between two untouched runs, after a warm-up); "
    figures += f"PSNR {own.psnr_text()} dB"
    said = trial.comparison.busy()
    return untouched, own, f"{figures}\n  {said}" if said else figures, ""


def _written(trial: Trial) -> Result:
    untouched, own, figures, fault = pair(trial)
    shot, studio, busy = trial.shots[own.method], trial.studio, bool(trial.comparison.busy())
    sheet = side_by_side([untouched.picture, own.picture], [untouched.caption(), own.caption(busy)], trial.prompt)
    record = studio.record(trial.prompt, trial.seed, shot) | {
        "untouched_seconds": mean(untouched.times),
        "speed_ratio": mean(own.ratios),
        "speed_ratios": list(own.ratios),
        "psnr_db": own.psnr_db if own.usable else None,
        "identical": bool(own.unchanged and not own.fault),
        "timing": "one run between two untouched ones, after a warm-up of two steps",
    }
    path = write_image(free_name(studio.folder, trial.prompt), sheet, record)
    return Result(path, shot.seconds, studio.memory(shot), fault, figures)


class Line(NamedTuple):
    """A row of the sheet: one prompt with one pipeline."""

    model: str  # name of the pipeline
    prompt: str  # what is drawn
    rows: list[Row]  # see `chosen`
    record: dict[str, Any]  # of the trial


class Sheet:
    """Prompts drawn with each pipeline; which methods are fastest and closest is measured on the first prompt."""

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
        first = len({UNTOUCHED, *methods})
        tried = [first, *[min(3, first)] * (len(prompts) - 1)]
        self.images = len(models) * sum(rounds * each + self._again for each in tried)  # at most

    def run(self, on_step: OnStep, on_image: OnImage) -> None:
        untouched = PatchConfig.preset(UNTOUCHED)
        for model in self._models:
            pipe = self._load(Request(tuple(self._prompts), untouched, model=model, **self._settings))
            denoisers = find_denoisers(pipe)  # tokens of transformers cannot be merged
            methods = [method for method in self._methods if fits(PatchConfig.preset(known_method(method)), denoisers)]
            for number, prompt in enumerate(self._prompts):
                studio = Studio(pipe, Request((prompt,), untouched, model=model, **self._settings), Path(), on_step)
                trial = Trial(studio, methods, self._rounds, again=self._again)

                def tell(said: str, fault: str, begin: str = f"{model}, {prompt}: ") -> None:
                    on_image(begin + said, fault and begin + fault)

                trial.run(tell, warm_up=number == 0)
                rows = trial.rows if number else chosen(trial.rows)
                methods = [row.method for row in rows]
                self.lines.append(Line(model, prompt, rows, trial.to_dict()))

    def write(self, folder: Path) -> Path:
        """Write the sheet as PNG, and a JSON file next to it, and return the path of the sheet."""
        columns = max(len(line.rows) for line in self.lines)
        size = max(line.rows[0].picture.size for line in self.lines)
        blank = Image.new("RGB", size, "white")  # where no method made another image of its own
        images, captions, title = [], [], TITLE
        for line in self.lines:
            missing = columns - len(line.rows)
            images += [row.picture.resize(size) for row in line.rows] + [blank] * missing
            captions += [(f"{line.model}, {line.rows[0].caption()[0]}", line.prompt)]
            if was_busy := bool(self.busy(line.model)):
                title = f"{TITLE}; {BUSY_TITLE}"
            for row in line.rows[1:]:  # whose place promises a method that is faster
                name, details = row.caption(was_busy)
                captions.append((name, details if was_busy or row.speed > 1 else f"not faster: {details}"))
            captions += [("", "")] * missing
        sheet = side_by_side(images, captions, title, columns)
        drawn = "one image each between two untouched ones" if self._again else f"{self._rounds} interleaved rounds"
        record = {"trials": [line.record for line in self.lines], "timing": f"{drawn}, after a warm-up of two steps"}
        return write_image(free_name(folder, "demo sheet"), sheet, record)

    def summary(self) -> Iterator[str]:
        """Yield a line for each method of each pipeline: how many times as fast, and how close."""
        for model in dict.fromkeys(line.model for line in self.lines):
            if list(self._rows(model)) == [UNTOUCHED]:
                yield f"{model}: no method changed the image and kept {LEAST:g} dB PSNR to the untouched one"
            for method, rows in self._rows(model).items():
                if method == UNTOUCHED:
                    continue
                speed = Spread.over([ratio for row in rows for ratio in row.ratios]).words()
                close = [row.psnr_db for row in rows if math.isfinite(row.psnr_db)]
                psnr = f"PSNR {median(close):.1f} dB" if close else "identical"
                yield f"{model}, {method}: {speed} times as fast, {psnr} (median of {len(rows)} prompts)"
            if said := self.busy(model):
                yield f"{model}: {said}"

    def busy(self, model: str) -> str:
        return busy([second for row in rows for second in row.times] for rows in self._rows(model).values())

    def _rows(self, model: str) -> dict[str, list[Row]]:
        rows = [row for line in self.lines if line.model == model for row in line.rows]
        return {name: [row for row in rows if row.method == name] for name in dict.fromkeys(row.method for row in rows)}


def chosen(rows: Sequence[Row]) -> list[Row]:
    """Return untouched, the fastest and the closest of the methods that were faster; the fastest alone if none was.

    A method that changed nothing, or made another image of it, below `LEAST` dB, has no place among them.
    """
    usable = [row for row in rows if row.usable and row.psnr_db >= LEAST]
    if not usable:
        return [rows[0]]
    fastest = max(usable, key=lambda row: row.speed)
    closest = max((row for row in usable if row.speed > 1), key=lambda row: row.psnr_db, default=fastest)
    return [rows[0], fastest] + [closest] * (closest is not fastest)
