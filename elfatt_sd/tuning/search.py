"""Search for a choice that keeps to the budget, and prove it on held-out images, interleaved with untouched ones."""

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
from elfatt_sd.families import find_denoisers
from elfatt_sd.measure import Comparison, Turn, busy, ratios
from elfatt_sd.runtime.layer import fitted
from elfatt_sd.tuning.budget import Budget, Measure
from elfatt_sd.tuning.model import Choice, Model
from elfatt_sd.tuning.probe import Candidate, LayerFigures, Probe, stretches_of
from elfatt_sd.tuning.runs import Deviation, Drawn, Point, Proof, Runs, Sample, Store, closeness

STRETCHES, LEAST_STEPS = 5, 4  # of a run at most, and steps of each at least, so that they can share
CALIBRATED = 2  # images in which the stretches of a choice are approximated alone
EXPECTED = 3  # images that say as much of how far predictions are off as is expected: nothing
TRIES = 2  # choices that are run with the prompts of the search
ALIKE = 0.5  # dB between two predictions that are not worth a run each
WORTH = 1.03  # times as fast as something else, below which nothing is worth its while
AIMED = 1.02  # times the speed that was asked for, as times differ by some percent
STARTS = 35.0  # dB predicted, where closeness is measured by something else
_EFFECTS = 1.5  # untouched images that the effects of layers on the denoiser's output may cost
PROOFS = 3  # choices that are run with the held-out prompts
LEAST_SLOPE = 0.3  # dB of held-out images for each that is predicted, of which corrections make use
NEAR = 2.0  # dB above what was asked for at which a faster choice is looked for
RETIMED = 2  # held-out images of which the untouched one is drawn again to time a corrected choice

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
        if drawn is not again and not drawn.same(again) and self.runs.draw(first).same(again):
            self.store.clear()  # the model repeats itself, so that what is kept is of another one
            drawn = self._draw_untouched(first)
        self.floor = closeness(self.measure, drawn, again)  # which a metric that fails does not pass
        self.untouched = [drawn, *map(self._draw_untouched, others)]
        self._seconds = [each.seconds for each in self.untouched[1:]]  # the first run warms up
        if drawn is not again or not others:  # seconds that are kept are those of another time
            self._seconds = [self.runs.draw(first).seconds]
        self._pace = self.runs.pace()
        self.calls = len(self.runs.pipe.scheduler.timesteps)

    def _draw_untouched(self, sample: Sample) -> Drawn:
        return self.store.drawn(sample, functools.partial(self.runs.draw_recorded, sample))

    @property
    def seconds(self) -> float:
        """Of an untouched image."""
        return statistics.median(self._seconds)

    def measure_layers(self) -> None:
        """Measure every approximation in every layer, and what a layer's error does to the image."""
        self.stretches = stretches_of(self.calls, max(1, min(STRETCHES, self.calls // LEAST_STEPS)))
        self.say("measuring layers", 1)
        figures = self.store.known("layers", self._probe, read_figures)
        drawn, again = self.untouched[0], self._again
        if again is None or not again.same(drawn):  # measuring layers may compute otherwise, where models are compiled
            again = self.runs.draw(self.samples[0])
        self.floor = closeness(self.measure, drawn, again)
        self.model = Model(figures, self.stretches, share=self.budget.memory is None)
        probed = sum(len(stretch.probed) for stretch in self.stretches)  # steps
        self.layer_calls = {name: own.calls / probed for name, own in figures.items()}
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
            tried[choice.psnr] = self._try(choice)
            choice = self._next()
            fastest = max((rival.times for rival in self.rivals()), default=0.0)
            if self.budget.closeness is not None and fastest * WORTH >= self.times(choice):
                break
        return self._next()

    def _start(self) -> Choice:
        asked = self.budget.closeness
        return self.fast_enough() if asked is None else self.at(asked if self.measure.name == "PSNR" else STARTS)

    def _next(self) -> Choice:
        asked = self.budget.closeness
        return self.fast_enough() if asked is None else self.at(self._predicted_for(asked))

    def learn_speed(self, point: Point, choice: Choice) -> None:
        """Learn what part of the predicted seconds a run really saves."""
        saved = self.seconds * (1 - 1 / point.times)
        self.realised = min(1.5, max(0.2, saved / max(choice.saved, 1e-9)))

    def _predicted_for(self, asked: float) -> float:
        """Return the predicted PSNR at which a closeness is to be expected."""
        if self.measure.name == "PSNR":
            return asked - self.offset()
        points = sorted((point.predicted, point.mean) for point in self.points if point.predicted is not None)
        known = [(one, mean) for one, mean in points if math.isfinite(mean)]
        if not known:
            return STARTS
        if len(known) == 1:
            one, mean = known[0]
            return one + (-5 if self.measure.keeps(mean, asked) else 10)
        pairs = itertools.pairwise(known)
        (low, worse), (high, better) = min(pairs, key=lambda pair: min(abs(mean - asked) for _, mean in pair))
        if better == worse:
            return low if self.measure.keeps(better, asked) else high
        return low + (high - low) * (asked - worse) / (better - worse)

    def offset(self) -> float:
        known = ((one.mean - one.predicted, len(one.closeness)) for one in self.points if one.predicted)
        pairs = [(off, images) for off, images in known if math.isfinite(off)]
        return sum(off * images for off, images in pairs) / (EXPECTED + sum(images for _, images in pairs))

    def at(self, psnr: float) -> Choice:
        return max((choice for choice in self.curve if choice.psnr >= psnr), key=lambda choice: choice.saved)

    def fast_enough(self) -> Choice:
        wanted = self.seconds * (1 - 1 / (AIMED * (self.budget.speed or 1.0))) / self.realised
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

    def run_config(self, name: str, config: PatchConfig, count: int) -> None:
        """Draw the first images of the search with a configuration that was not chosen here, such as a preset's."""
        self.say(f"running {name}", min(count, len(self.samples)))
        self._run(name, config, None, self.samples[:count])

    def _try(self, choice: Choice) -> Point:
        """Draw the images of the search with a choice, and learn from it."""
        point = self._run("tuned", self.model.config(choice), choice.psnr, self.samples)
        self.learn_speed(point, choice)
        return point

    def _run(self, name: str, config: PatchConfig, predicted: float | None, samples: Sequence[Sample]) -> Point:
        paces = [self.runs.pace()]
        drawn = [self.runs.draw(sample, config) for sample in samples]
        seconds = [each.seconds for each in drawn]
        if len(seconds) == 1:  # which says nothing of how far it is to be trusted
            seconds.append(self.runs.draw(samples[0], config).seconds)
        paces.append(self.runs.pace())
        slower = statistics.fmean(paces) / self._pace  # than when the untouched ones were drawn
        pairs = zip(self.untouched, drawn, strict=False)
        close = tuple(closeness(self.measure, before, after) for before, after in pairs)
        speed = tuple(slower * self.seconds / each for each in seconds)
        self.points.append(Point(name, config, predicted, close, speed, busy([self._seconds, paces, seconds])))
        return self.points[-1]

    def check_reachable(self) -> None:
        """Refuse a speed that no choice has; where the prediction falls short of it, the fastest choice is run."""
        speed, fastest = self.budget.speed, self.curve[-1]
        if speed is None or self.seconds >= speed * (self.seconds - fastest.saved):
            return
        self.say("running the fastest choice", len(self.samples))
        point = self._try(fastest)
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


class Proving:
    """Proves what a search has found."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.runs, self.budget, self.measure = search.runs, search.budget, search.measure
        self.proofs: list[Proof] = []
        self._untouched: list[Drawn] = []

    def prove(self, choice: Choice) -> Proof | None:
        """Draw the held-out images, untouched and with a choice, and correct the choice until it holds there."""
        best: Proof | None = None
        following: Choice | None = choice
        for left in reversed(range(PROOFS + 1)):
            if following is not None and (not left or following.saved <= 0):
                following = None
            rival = self._rival(best)
            by_speed = self.budget.closeness is not None  # otherwise the choice comes first
            if rival and (not following or (by_speed and rival.times >= self.search.times(following))):
                proof = self._proof(rival.name, fitted(rival.config, find_denoisers(self.runs.pipe)), None)
            elif following is not None and (best is None or self.search.times(following) > best.point.times):
                proof = self._proof("tuned", self.search.model.config(following), following.psnr)
                following = self._corrected(following, proof)
            else:
                break
            if self._holds(proof) and (best is None or self._betters(proof.point, best.point)):
                best = proof
        return best if best is not None and best.point.times >= WORTH else None

    def _rival(self, best: Proof | None) -> Point | None:
        """Return the best configuration that is there to compare with, where it betters what is proved."""
        proved = {proof.point.name for proof in self.proofs}
        found = rival = None if best is None else best.point
        for each in self.search.rivals():
            if each.name not in proved and each.times >= WORTH and (rival is None or self._betters(each, rival)):
                rival = each
        return None if rival is found else rival

    def _proof(self, name: str, config: PatchConfig, predicted: float | None) -> Proof:
        """Draw the held-out images; the untouched ones interleaved with the others, all of them the first time."""
        samples, configs = self.search.held_out, {"untouched": None, "tuned": config}
        timed = min(RETIMED if self._untouched else len(samples), len(samples))
        drawn: dict[str, list[Drawn]] = {each: [] for each in configs}
        self.search.say(f"proving {name}", len(samples) + timed)

        def take(turn: Turn) -> float:
            drawn[turn.name].append(self.runs.draw(samples[turn.number], configs[turn.name]))
            return drawn[turn.name][-1].seconds

        compared = Comparison([*configs], take, timed)
        compared.run()
        self._untouched = untouched = drawn["untouched"] + self._untouched[timed:]
        tuned = drawn["tuned"] + [self.runs.draw(sample, config) for sample in samples[timed:]]
        close = tuple(closeness(self.measure, before, after) for before, after in zip(untouched, tuned, strict=True))
        speed = ratios(compared.times["untouched"], compared.times["tuned"])
        point = Point(name, config, predicted, close, speed, compared.busy())
        self.search.points.append(point)
        self.proofs.append(Proof(point, samples, untouched, tuned, self.measure.higher))
        return self.proofs[-1]

    def _betters(self, point: Point, other: Point) -> bool:
        """Tell which of two is better: the faster one or, where speed alone is asked for, the closer one."""
        if self.budget.closeness is not None:
            return point.times > other.times
        return self.measure.keeps(point.mean, other.mean)

    def _holds(self, proof: Proof) -> bool:
        memory = self.budget.memory
        return self.search.keeps(proof.point) and (memory is None or proof.peak <= memory * 2**30)

    def _corrected(self, choice: Choice, proof: Proof) -> Choice | None:
        self.search.learn_speed(proof.point, choice)
        if self.budget.closeness is None:
            following = self.search.fast_enough()
            return None if self._holds(proof) or following is choice else following
        if self.measure.name != "PSNR":
            return None if self._holds(proof) else self.search.at(choice.psnr + 3.0)
        off = proof.point.mean - self.budget.closeness
        room = min(off, choice.psnr + self.search.offset() - self.budget.closeness)
        if not math.isfinite(off) or (off >= 0 and room <= NEAR):
            return None
        wanted = choice.psnr + 0.3 - off / self._slope() if off < 0 else choice.psnr + NEAR / 2 - room
        following = self.search.at(wanted)
        return None if following.psnr == choice.psnr else following

    def _slope(self) -> float:
        known = [(proof.point.predicted, proof.point.mean) for proof in self.proofs]
        proved = [(predicted, mean) for predicted, mean in known if predicted is not None and math.isfinite(mean)]
        if len(proved) < 2 or proved[-1][0] == proved[-2][0]:
            return 1.0
        slope = (proved[-1][1] - proved[-2][1]) / (proved[-1][0] - proved[-2][0])
        return min(1.0, max(LEAST_SLOPE, slope))

    def check(self, proof: Proof | None) -> None:
        """Refuse a speed that was not reached on the held-out images, or not together with the closeness."""
        if proof is not None or self.budget.speed is None or not self.proofs:
            return
        near = max(self.proofs, key=lambda each: each.point.times)
        raise ElfattFailure(
            f"{self.budget.words(self.measure)}: not reached on held-out images; the nearest choice is "
            f"{near.point.times:.2f} times as fast, at {self.measure.words(near.point.mean)}. Ask for less of either."
        )
