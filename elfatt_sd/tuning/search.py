"""Measure a pipeline's layers, predict what choices do, and choose by runs of a few prompts."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from elfatt_sd.config import PatchConfig
from elfatt_sd.errors import ElfattFailure
from elfatt_sd.measuring.clock import busy
from elfatt_sd.tuning.asked import Budget, Measure
from elfatt_sd.tuning.candidates import Candidate
from elfatt_sd.tuning.model import Choice, Model
from elfatt_sd.tuning.points import Point
from elfatt_sd.tuning.probe import LayerFigures, Probe, stretches_of
from elfatt_sd.tuning.runs import Deviation, Drawn, Runs, Sample, closeness
from elfatt_sd.tuning.store import Store

STRETCHES, LEAST_STEPS = 5, 4  # of a run at most, and steps of each at least, so that they can share
CALIBRATED = 2  # images in which the stretches of a choice are approximated alone
EXPECTED = 3  # images that say as much of how far predictions are off as is expected: nothing
TRIES = 2  # choices that are run with the prompts of the search
ALIKE = 0.5  # dB between two predictions that are not worth a run each
WORTH = 1.03  # times as fast as something else, below which nothing is worth its while
AIMED = 1.02  # times the speed that was asked for, as times differ by some percent
STARTS = 35.0  # dB predicted, where closeness is measured by something else
_EFFECTS = 1.5  # untouched images that the effects of layers on the denoiser's output may cost

Say = Callable[[str, float], None]


class Search:
    """Tunes one pipeline."""

    def __init__(
        self,
        runs: Runs,
        samples: Sequence[Sample],
        searched: int,
        budget: Budget,
        measure: Measure,
        store: Store,
        say: Say = lambda stage, images: None,
    ) -> None:
        self.runs = runs
        self.samples, self.held_out = samples[:searched], samples[searched:]
        self.budget = budget
        self.measure = measure
        self.store = store
        self.say = say
        self.points: list[Point] = []
        self.floor = math.inf  # closeness of two untouched images of the same seed
        self.curve: list[Choice] = []
        self.untouched: list[Drawn] = []
        self._again: Drawn | None = None  # the first of them, drawn once more
        self._pace = 1.0  # seconds of a step at that time
        self.realised = 1.0  # fraction of the predicted seconds that is really saved

    def measure_untouched(self) -> None:
        """Draw the untouched images of the search; of those that are kept, the first is drawn again."""
        self.say("drawing untouched images", len(self.samples))
        first, *others = self.samples
        again = self.runs.draw_recorded(first)
        drawn = self.store.drawn(first, lambda: again)
        self._again = None if drawn is again else again
        drawn = drawn if drawn is again else self._first(again)
        self.floor = closeness(self.measure, drawn, again)  # which a metric that fails does not pass
        self.untouched = [drawn, *map(self._untouched, others)]
        self._seconds = [each.seconds for each in self.untouched[1:]]  # the first run warms up
        if drawn is not again or not others:  # seconds that are kept are those of another time
            self._seconds = [self.runs.draw(first).seconds]
        self._pace = self.runs.pace()
        self.calls = len(self.runs.pipe.scheduler.timesteps)

    def _untouched(self, sample: Sample) -> Drawn:
        return self.store.drawn(sample, functools.partial(self.runs.draw_recorded, sample))

    def _first(self, again: Drawn) -> Drawn:
        sample = self.samples[0]
        drawn = self._untouched(sample)
        if drawn.same(again) or not self.runs.draw(sample).same(again):  # the model does not repeat itself
            return drawn
        self.store.clear()
        return self._untouched(sample)

    @property
    def seconds(self) -> float:
        """Of an untouched image."""
        return statistics.median(self._seconds)

    def measure_layers(self) -> None:
        """Measure every approximation in every layer, and what a layer's error does to the image."""
        self.stretches = stretches_of(self.calls, max(1, min(STRETCHES, self.calls // LEAST_STEPS)))
        self.say("measuring layers", 1)
        figures = self.store.known("layers", self._probe, read_figures)
        self.floor = self._noise()
        self.model = Model(figures, self.stretches, share=self.budget.memory is None)
        self.layer_calls = {name: own.calls / self._probed for name, own in figures.items()}
        self._calibrate("stretches", 0, map(self.model.reference, range(len(self.stretches))))

    def _calibrate(self, what: str, image: int, parts: Iterable[Mapping[str, Candidate]]) -> None:
        """Draw an image with one stretch after the other approximated alone, and see what each does to it."""
        self.say(f"measuring {what}", sum(1 - stretch.first / self.calls for stretch in self.stretches))
        for number, phases in enumerate(parts):
            config = self.model.alone(number, phases)
            if config.active:
                digest = hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode()).hexdigest()[:12]
                alone = functools.partial(self._alone, number, image, config)
                far = self.store.known(f"alone-{digest}-{image}", alone, lambda data: Deviation(*map(float, data)))
                self.model.calibrate(number, image, far, phases)
        self.model.fit()
        self.curve = self.model.curve(self.layer_calls)

    def _noise(self) -> float:
        drawn, again = self.untouched[0], self._again
        if again is None or not again.same(drawn):  # measuring layers may compute otherwise, where models are compiled
            again = self.runs.draw(self.samples[0])
        return closeness(self.measure, drawn, again)

    @property
    def _probed(self) -> int:
        return sum(len(stretch.probed) for stretch in self.stretches)

    def _probe(self) -> Any:
        effects, scale = round(_EFFECTS * self.calls), self.runs.settings.guidance
        probe = Probe(self.runs.pipe, self.stretches, effects=effects, scale=scale)
        with probe, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            drawn = self.runs.draw_as_is(self.samples[0])
        self._again = self._again or drawn
        return {name: own.to_dict() for name, own in probe.figures.items()}

    def _alone(self, number: int, image: int, config: PatchConfig) -> Deviation:
        return self.runs.deviation(self.stretches[number].first, self.samples[image], config)

    def settle(self) -> Choice:
        """Return the fastest choice that keeps to the budget by runs of the search's images; untouched if none does."""
        tried: dict[float, Point] = {}  # by predicted PSNR
        parts = self.model.parts(self._start())
        for image in list(range(len(self.samples)))[-CALIBRATED:]:  # images differ much
            self._calibrate("a choice", image, parts)
        choice = self._start()
        while len(tried) < TRIES and choice.saved > 0 and all(abs(choice.psnr - one) > ALIKE for one in tried):
            self.say(f"trying {choice.psnr:.1f} dB predicted", len(self.samples))
            tried[choice.psnr] = point = self.run(choice, self.samples, self.untouched)
            self.points.append(point)
            self.learn_speed(point, choice)
            choice = self._next()
            if self._is_behind(choice):
                break
        return self._next()

    def _is_behind(self, choice: Choice) -> bool:
        fastest = max((rival.times for rival in self.rivals()), default=0.0)
        return self.budget.closeness is not None and fastest * WORTH >= self.times(choice)

    def _start(self) -> Choice:
        asked = self.budget.closeness
        if asked is None:
            return self.fast(self.budget.speed or 1.0)
        return self.at(asked if self.measure.name == "PSNR" else STARTS)

    def learn_speed(self, point: Point, choice: Choice) -> None:
        """Learn what part of the predicted seconds a run really saves."""
        saved = self.seconds * (1 - 1 / point.times)
        self.realised = min(1.5, max(0.2, saved / max(choice.saved, 1e-9)))

    def _next(self) -> Choice:
        asked = self.budget.closeness
        return self.fast(self.budget.speed or 1.0) if asked is None else self.at(self._predicted_for(asked))

    def _predicted_for(self, asked: float) -> float:
        if self.measure.name == "PSNR":
            return asked - self.offset()
        points = sorted((point.predicted, point.mean) for point in self.points if point.predicted is not None)
        known = [(one, mean) for one, mean in points if math.isfinite(mean)]
        if not known:
            return STARTS
        if len(known) == 1:
            one, mean = known[0]
            return one + (10 if self._too_far(mean) else -5)
        (low, worse), (high, better) = _around(known, asked)
        if better == worse:
            return high if self._too_far(better) else low
        return low + (high - low) * (asked - worse) / (better - worse)

    def offset(self) -> float:
        known = ((one.mean - one.predicted, len(one.closeness)) for one in self.points if one.predicted)
        pairs = [(off, images) for off, images in known if math.isfinite(off)]
        return sum(off * images for off, images in pairs) / (EXPECTED + sum(images for _, images in pairs))

    def _too_far(self, mean: float) -> bool:
        return self.budget.closeness is not None and not self.measure.keeps(mean, self.budget.closeness)

    def at(self, psnr: float) -> Choice:
        return max((choice for choice in self.curve if choice.psnr >= psnr), key=lambda choice: choice.saved)

    def fast(self, speed: float) -> Choice:
        wanted = self.seconds * (1 - 1 / (AIMED * speed)) / self.realised
        enough = [choice for choice in self.curve if choice.saved >= wanted]
        return min(enough, key=lambda choice: choice.mse, default=self.curve[-1])

    def times(self, choice: Choice) -> float:
        return self.seconds / (self.seconds - self.realised * choice.saved)

    def keeps(self, point: Point) -> bool:
        budget = self.budget
        close = budget.closeness is None or self.measure.keeps(point.mean, budget.closeness)
        return close and (budget.speed is None or point.times >= budget.speed)

    def rivals(self) -> list[Point]:
        return [point for point in self.points if point.predicted is None and self.keeps(point)]

    def run(self, choice: Choice, samples: Sequence[Sample], untouched: Sequence[Drawn]) -> Point:
        """Draw images with a choice, and compare them with the untouched ones."""
        return self._run("tuned", self.model.config(choice), choice.psnr, samples, untouched)

    def run_config(self, name: str, config: PatchConfig, count: int) -> Point:
        """Draw the first images of the search with a configuration that was not chosen here, such as a preset's."""
        self.say(f"running {name}", min(count, len(self.samples)))
        point = self._run(name, config, None, self.samples[:count], self.untouched)
        self.points.append(point)
        return point

    def _run(
        self,
        name: str,
        config: PatchConfig,
        predicted: float | None,
        samples: Sequence[Sample],
        untouched: Sequence[Drawn],
    ) -> Point:
        paces = [self.runs.pace()]
        drawn = [self.runs.draw(sample, config) for sample in samples]
        seconds = [each.seconds for each in drawn]
        if len(seconds) == 1:  # which says nothing of how far it is to be trusted
            seconds.append(self.runs.draw(samples[0], config).seconds)
        paces.append(self.runs.pace())
        slower = statistics.fmean(paces) / self._pace  # than when the untouched ones were drawn
        pairs = zip(untouched, drawn, strict=False)
        close = tuple(closeness(self.measure, before, after) for before, after in pairs)
        speed = tuple(slower * self.seconds / each for each in seconds)
        return Point(name, config, predicted, close, speed, busy([self._seconds, paces, seconds]))

    def check_reachable(self) -> None:
        """Refuse a speed that no choice has; where the prediction falls short of it, the fastest choice is run."""
        speed, fastest = self.budget.speed, self.curve[-1]
        if speed is None or self.seconds >= speed * (self.seconds - fastest.saved):
            return
        self.say("running the fastest choice", len(self.samples))
        point = self.run(fastest, self.samples, self.untouched)
        self.points.append(point)
        self.learn_speed(point, fastest)
        if point.times < speed:
            raise ElfattFailure(
                f"speed={speed:g} is not reached: the fastest choice is {point.times:.2f} times as fast as untouched, "
                f"at {self.measure.words(point.mean)}; ask for less, or for larger images."
            )


def read_figures(data: Mapping[str, Any]) -> dict[str, LayerFigures]:
    """Return what was measured in each layer, from plain data."""
    if not data:
        raise LookupError("no layer was measured")
    return {name: LayerFigures.from_dict(own) for name, own in data.items()}


def _around(known: Sequence[tuple[float, float]], asked: float) -> tuple[tuple[float, float], tuple[float, float]]:
    pairs = list(itertools.pairwise(known))
    return min(pairs, key=lambda pair: min(abs(pair[0][1] - asked), abs(pair[1][1] - asked)))
