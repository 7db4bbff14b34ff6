"""Tune a pipeline: measure its layers, predict, choose by runs of a few prompts, and prove the choice on others."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from elfatt_sd.choosing import fitted
from elfatt_sd.config import PatchConfig
from elfatt_sd.errors import ElfattFailure
from elfatt_sd.families import find_denoisers
from elfatt_sd.tuning.asked import Budget, Measure
from elfatt_sd.tuning.model import Choice, Model
from elfatt_sd.tuning.points import Point, Proof
from elfatt_sd.tuning.probe import Probe, stretches_of
from elfatt_sd.tuning.records import figures_from, figures_to
from elfatt_sd.tuning.runs import Drawn, Runs, Sample, closeness, squared_error
from elfatt_sd.tuning.store import Store

STRETCHES, LEAST_STEPS = 5, 4  # of a run at most, and steps of each at least, so that they can share
CALIBRATED = 2  # images of the search by which the stretches are told apart
TRIES = 2  # choices that are run with the prompts of the search
ALIKE = 0.5  # dB between two predictions that are not worth a run each
PROOFS = 3  # choices that are run with the held-out prompts
LEAST_SLOPE = 0.3  # dB of held-out images for each that is predicted, of which corrections make use
NEAR = 2.0  # dB above what was asked for at which a faster choice is looked for
STARTS = 35.0  # dB predicted, where closeness is measured by something else
RETIMED = 2  # held-out images of which the untouched one is drawn again to time a corrected choice
WORTH = 1.03  # times as fast, below which a pipeline is left alone
_EFFECTS = 1.5  # untouched images that the effects of layers on the denoiser's output may cost, by each image
_COMPARED = 1  # choices whose errors are measured on the untouched path, before one is run

Say = Callable[[str, int], None]


class Search:
    """Tunes one pipeline.

    Args:
        runs: of the pipeline, which has no patch.
        samples: the images of the search first, then the held-out ones.
        searched: number of the former.
        budget: what is asked for.
        measure: how closeness is measured.
        store: of what was measured before.
        say: told what is being done, and how many images that draws.
    """

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
        self._proofs: list[Proof] = []
        self.realised = 1.0  # fraction of the predicted seconds that is really saved

    def measure_untouched(self) -> None:
        """Draw the untouched images of the search, the first of them twice: does the model repeat itself?"""
        self.say("drawing untouched images", len(self.samples) + 1)
        first, *others = self.samples
        again = self.runs.draw_recorded(first)
        drawn = self._first(again)
        self.floor = closeness(self.measure, drawn, again)
        self.untouched = [dataclasses.replace(drawn, seconds=again.seconds), *map(self._untouched, others)]
        self.calls = len(self.runs.pipe.scheduler.timesteps)

    def _untouched(self, sample: Sample) -> Drawn:
        return self.store.drawn(sample, functools.partial(self.runs.draw_recorded, sample))

    def _first(self, again: Drawn) -> Drawn:
        """Return the first image; where the one that is kept is another model's, everything that is kept is forgotten.

        Not all that an image depends on is in the store's key: inputs, adapters and their scales, the other models.
        """
        sample = self.samples[0]
        drawn = self._untouched(sample)
        if drawn.same(again) or not self.runs.draw(sample).same(again):  # the model does not repeat itself
            return drawn
        self.store.clear()
        return self._untouched(sample)

    @property
    def seconds(self) -> float:
        """Of an untouched image."""
        return statistics.median(drawn.seconds for drawn in self.untouched)

    def measure_layers(self) -> None:
        """Measure every approximation in every layer, and what a layer's error does to the image."""
        self.stretches = stretches_of(self.calls, max(1, min(STRETCHES, self.calls // LEAST_STEPS)))
        self.say("measuring layers", min(CALIBRATED, len(self.samples)))
        figures = self.store.known("layers", self._probe, figures_from)
        self.model = Model(figures, self.stretches, share=self.budget.memory is None)
        self.layer_calls = {name: own.calls / self._probed for name, own in figures.items()}
        self._compare(self.model.everywhere())
        for number in range(len(self.stretches)):
            images = min(CALIBRATED, len(self.samples))
            self.say(f"measuring stretch {number + 1} of {len(self.stretches)}", images)
            for image in range(images):
                known = self.store.known(
                    f"stretch-{number}-{image}", functools.partial(self._alone, number, image), float
                )
                self.model.calibrate(number, known, self.model.reference(number))
        self.curve = self.model.curve(self.layer_calls)

    @property
    def _probed(self) -> int:
        return sum(len(stretch.probed) for stretch in self.stretches)

    def _probe(self) -> Any:
        known = None
        for sample in self.samples[:CALIBRATED]:
            probe = Probe(self.runs.pipe, self.stretches, effects=round(_EFFECTS * self.calls), known=known)
            with probe, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.runs.draw_as_is(sample)
            known = probe.figures
        return figures_to(probe.figures)

    def _compare(self, choice: Choice) -> None:
        """See what error a choice really gives the denoiser's output."""
        self.say("measuring a choice", min(CALIBRATED, len(self.samples)))
        config = self.model.config(choice)
        name = hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode()).hexdigest()[:12]

        def measure() -> list[float]:
            errors = [self.runs.errors(sample, config) for sample in self.samples[:CALIBRATED]]
            return np.mean([each for each in errors if each], axis=0).tolist() if any(errors) else []

        if errors := self.store.known(f"choice-{name}", measure, list[float]):
            self.model.compare(choice, errors)

    def _alone(self, number: int, image: int) -> float:
        """Return the mean squared error of an image in which one stretch alone is approximated."""
        config = self.model.alone(number, self.model.reference(number))
        drawn = self.runs.draw_from(self.stretches[number].first, self.samples[image], config)
        return squared_error(self.untouched[image], drawn)

    def settle(self) -> Choice:
        """Return the fastest choice that keeps to the budget by runs of the search's images; untouched if none does."""
        tried: dict[float, Point] = {}  # by predicted PSNR
        choice = self._start()
        for _ in range(_COMPARED):
            self._compare(choice)
            self.curve = self.model.curve(self.layer_calls)
            choice = self._start()
        while len(tried) < TRIES and choice.saved > 0 and all(abs(choice.psnr - one) > ALIKE for one in tried):
            self.say(f"trying {choice.psnr:.1f} dB predicted", len(self.samples))
            tried[choice.psnr] = point = self.run(choice, self.samples, self.untouched)
            self.points.append(point)
            self._learn_speed(point, choice)
            choice = self._next()
        return self._next()

    def _start(self) -> Choice:
        asked = self.budget.closeness
        if asked is None:
            return self.fast(self.budget.speed or 1.0)
        return self.at(asked if self.measure.name == "PSNR" else STARTS)

    def _learn_speed(self, point: Point, choice: Choice) -> None:
        """Learn what part of the predicted seconds a run really saves."""
        saved = self.seconds * (1 - 1 / point.times)
        self.realised = min(1.5, max(0.2, saved / max(choice.saved, 1e-9)))

    def _next(self) -> Choice:
        """Return the choice that keeps to the budget, by the predictions and what runs have shown of them."""
        asked = self.budget.closeness
        if asked is None:
            return self.fast(self.budget.speed or 1.0)
        predicted = self._predicted_for(asked)
        return self.curve[0] if predicted is None else self.at(predicted)

    def _predicted_for(self, asked: float) -> float | None:
        """Return the predicted PSNR at which images are as close as asked, by the points that were run."""
        points = sorted((point.predicted, point.mean) for point in self.points if point.predicted is not None)
        known = [(one, mean) for one, mean in points if math.isfinite(mean)]
        if not known:
            return asked if self.measure.name == "PSNR" else STARTS
        if len(known) == 1 or self.measure.name == "PSNR":
            one, mean = min(known, key=lambda pair: abs(pair[1] - asked))
            return one + (asked - mean) if self.measure.name == "PSNR" else one + (10 if self._too_far(mean) else -5)
        (low, worse), (high, better) = _around(known, asked)
        if better == worse:
            return high if self._too_far(better) else low
        return low + (high - low) * (asked - worse) / (better - worse)

    def _too_far(self, mean: float) -> bool:
        return self.budget.closeness is not None and not self.measure.keeps(mean, self.budget.closeness)

    def at(self, psnr: float) -> Choice:
        """Return the fastest choice that is predicted to be so close, in dB; untouched if none is."""
        return max((choice for choice in self.curve if choice.psnr >= psnr), key=lambda choice: choice.saved)

    def fast(self, speed: float) -> Choice:
        """Return the closest choice that is predicted to be so many times as fast, or the fastest one."""
        wanted = self.seconds * (1 - 1 / speed) / self.realised
        enough = [choice for choice in self.curve if choice.saved >= wanted]
        return min(enough, key=lambda choice: choice.mse, default=self.curve[-1])

    def run(self, choice: Choice, samples: Sequence[Sample], untouched: Sequence[Drawn]) -> Point:
        """Draw images with a choice, and compare them with the untouched ones."""
        return self._run("tuned", self.model.config(choice), choice.psnr, samples, untouched)

    def run_config(self, name: str, config: PatchConfig, count: int) -> Point:
        """Draw the first images of the search with a configuration that was not chosen here, such as a preset's."""
        self.say(f"running {name}", min(count, len(self.samples)))
        self.points.append(self._run(name, config, None, self.samples[:count], self.untouched))
        return self.points[-1]

    def _run(
        self,
        name: str,
        config: PatchConfig,
        predicted: float | None,
        samples: Sequence[Sample],
        untouched: Sequence[Drawn],
    ) -> Point:
        drawn = [self.runs.draw(sample, config) for sample in samples]
        pairs = list(zip(untouched, drawn, strict=False))
        close = tuple(closeness(self.measure, before, after) for before, after in pairs)
        speed = tuple(before.seconds / after.seconds for before, after in pairs)
        return Point(name, config, predicted, close, speed)

    def prove(self, choice: Choice) -> Proof | None:
        """Draw the held-out images, untouched and with a choice in turn, and correct the choice until it holds there.

        Returns:
            What holds; None where the pipeline is best left untouched.
        """
        untouched: list[Drawn] = []
        best: Proof | None = None
        following: Choice | None = choice
        for left in reversed(range(PROOFS + 1)):
            if following is not None and (not left or following.saved <= 0):
                following = None
            rival = self._rival(best)
            if rival is not None and (following is None or self._is_ahead(rival, following)):
                config = fitted(rival.config, find_denoisers(self.runs.pipe))
                proof = self._proof(rival.name, config, None, untouched)
            elif following is not None and (best is None or self._times(following) > best.point.times):
                proof = self._proof("tuned", self.model.config(following), following.psnr, untouched)
                following = self._corrected(following, proof)
            else:
                break
            best = self._better(best, proof)
        return best if best is not None and best.point.times >= WORTH else None

    def _rival(self, best: Proof | None) -> Point | None:
        """Return a preset, or what the pipeline was patched with, that by the images of the search betters a proof."""
        rival: Point | None = None if best is None else best.point
        proved = {proof.point.name for proof in self._proofs}
        for point in self.points:
            if point.predicted is None and point.name not in proved and point.times >= WORTH and self._keeps(point):
                rival = point if rival is None or self._betters(point, rival) else rival
        return None if best is not None and rival is best.point else rival

    def _is_ahead(self, rival: Point, choice: Choice) -> bool:
        """Tell whether a rival is to be proved before a choice, which is expected to be slower."""
        return self.budget.closeness is not None and rival.times >= self._times(choice)

    def _times(self, choice: Choice) -> float:
        """Return how many times as fast as untouched a choice is expected to be."""
        return self.seconds / (self.seconds - self.realised * choice.saved)

    def _proof(self, name: str, config: PatchConfig, predicted: float | None, untouched: list[Drawn]) -> Proof:
        """Draw the held-out images; the untouched ones in turn with the others, the first time."""
        first = not untouched
        self.say(f"proving {name}", len(self.held_out) + (len(self.held_out) if first else RETIMED))
        tuned, speed = [], []
        for number, sample in enumerate(self.held_out):
            if first or number < RETIMED:
                before = self.runs.draw(sample)
                untouched[number : number + 1] = [before]
            tuned.append(self.runs.draw(sample, config))
            if first or number < RETIMED:
                speed.append(before.seconds / tuned[-1].seconds)
        close = [closeness(self.measure, before, after) for before, after in zip(untouched, tuned, strict=True)]
        point = Point(name, config, predicted, tuple(close), tuple(speed))
        self.points.append(point)
        self._proofs.append(Proof(point, self.held_out, list(untouched), tuned, self.measure.higher))
        return self._proofs[-1]

    def _better(self, best: Proof | None, proof: Proof) -> Proof | None:
        """Return a proof that holds and betters the best one so far; otherwise that one."""
        return proof if self._holds(proof) and (best is None or self._betters(proof.point, best.point)) else best

    def _betters(self, point: Point, other: Point) -> bool:
        """Tell which of two is better: the faster one or, where speed alone is asked for, the closer one."""
        if self.budget.closeness is not None:
            return point.times > other.times
        return self.measure.keeps(point.mean, other.mean)

    def _keeps(self, point: Point) -> bool:
        """Tell whether the images of a configuration are as close and as fast as asked."""
        budget = self.budget
        close = budget.closeness is None or self.measure.keeps(point.mean, budget.closeness)
        return close and (budget.speed is None or point.times >= budget.speed)

    def _holds(self, proof: Proof) -> bool:
        """Tell whether a choice keeps to the budget on the held-out images."""
        memory = self.budget.memory
        return self._keeps(proof.point) and (memory is None or proof.peak <= memory * 2**30)

    def _corrected(self, choice: Choice, proof: Proof) -> Choice | None:
        """Return the choice to try after a proof; None if that one is right."""
        self._learn_speed(proof.point, choice)
        if self.budget.closeness is None:
            following = self.fast(self.budget.speed or 1.0)
            return None if self._holds(proof) or following is choice else following
        off = proof.point.mean - self.budget.closeness
        if self.measure.name != "PSNR":
            return None if self._holds(proof) else self._closer(choice)
        room = min(off, choice.psnr + self._offset() - self.budget.closeness)
        if not math.isfinite(off) or (off >= 0 and room <= NEAR):
            return None
        following = self.at(choice.psnr + 0.3 - off / self._slope() if off < 0 else choice.psnr + NEAR / 2 - room)
        return None if following.psnr == choice.psnr else following

    def _offset(self) -> float:
        """Return by how many dB all images that were drawn with choices are closer than predicted."""
        known = ((point.mean - point.predicted, len(point.closeness)) for point in self.points if point.predicted)
        pairs = [(off, images) for off, images in known if math.isfinite(off)]
        return sum(off * images for off, images in pairs) / max(1, sum(images for _, images in pairs))

    def _slope(self) -> float:
        """Return by how many dB images come closer for each that is predicted, as far as two proofs show it."""
        known = [(proof.point.predicted, proof.point.mean) for proof in self._proofs]
        proved = [(predicted, mean) for predicted, mean in known if predicted is not None and math.isfinite(mean)]
        if len(proved) < 2 or proved[-1][0] == proved[-2][0]:
            return 1.0
        slope = (proved[-1][1] - proved[-2][1]) / (proved[-1][0] - proved[-2][0])
        return min(1.0, max(LEAST_SLOPE, slope))

    def _closer(self, choice: Choice) -> Choice:
        """Return a choice that is 3 dB closer by prediction."""
        return self.at(choice.psnr + 3.0)

    def check_reachable(self) -> None:
        """Refuse a speed that no choice has; where the prediction falls short of it, the fastest choice is run.

        Raises:
            ElfattFailure: how fast the fastest choice is.
        """
        speed, fastest = self.budget.speed, self.curve[-1]
        if speed is None or self.seconds >= speed * (self.seconds - fastest.saved):
            return
        self.say("running the fastest choice", len(self.samples))
        point = self.run(fastest, self.samples, self.untouched)
        self.points.append(point)
        self._learn_speed(point, fastest)
        if point.times < speed:
            raise ElfattFailure(
                f"speed={speed:g} is not reached: the fastest choice is {point.times:.2f} times as fast as untouched, "
                f"at {self.measure.words(point.mean)}; ask for less, or for larger images."
            )

    def check_proved(self, proof: Proof | None) -> None:
        """Refuse a speed that was not reached on the held-out images, or not together with the closeness.

        Raises:
            ElfattFailure: what the choice was that came nearest.
        """
        if proof is not None or self.budget.speed is None or not self._proofs:
            return
        near = max(self._proofs, key=lambda each: each.point.times)
        raise ElfattFailure(
            f"{self.budget.words(self.measure)}: not reached on held-out images; the nearest choice is "
            f"{near.point.times:.2f} times as fast, at {self.measure.words(near.point.mean)}. Ask for less of either."
        )


def _around(known: Sequence[tuple[float, float]], asked: float) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the two neighbouring points between which a value lies, or the two nearest to it."""
    pairs = list(itertools.pairwise(known))
    return min(pairs, key=lambda pair: min(abs(pair[0][1] - asked), abs(pair[1][1] - asked)))
