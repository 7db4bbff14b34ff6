"""One prompt drawn with every method from one seed: how fast, how close to untouched, and which method to use."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from PIL import Image

from elfatt_sd.config import ElfattError, PatchConfig
from elfatt_sd.generation import OnStep, Studio, free_name, why_unchanged, write_image
from elfatt_sd.measuring.clock import Spread, Turn, busy, interleave, ratios, times_as_fast
from elfatt_sd.patch import patched, remove_patch
from elfatt_sd.pictures import psnr, side_by_side
from elfatt_sd.presets import METHODS, UNTOUCHED, known_method
from elfatt_sd.request import Request
from elfatt_sd.running import Shot

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
