"""Find the settings that a pipeline can take on this machine: ask for closeness or for speed, and have it proved."""

from __future__ import annotations

import functools
import itertools
import math
import os
import random
import shutil
import statistics
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from elfatt_sd import errors as checks
from elfatt_sd.config import PatchConfig, method_named
from elfatt_sd.devices import device_name, memory_counters
from elfatt_sd.drawing.studio import begin_of, check_run, check_steps, own_settings, tell_cut_prompts, versions
from elfatt_sd.errors import ElfattError, ElfattFailure
from elfatt_sd.evaluation.prompts import PromptFile, read_prompts
from elfatt_sd.families import family_of, find_denoisers, main_denoiser, step_denoisers, unwrap
from elfatt_sd.families.cuts import OUTPUT
from elfatt_sd.measure import CallTimer, Comparison, Turn, busy, ratios
from elfatt_sd.measure import Progress as Tell
from elfatt_sd.methods import attentions
from elfatt_sd.patch import patches_of, remove_patch, restored
from elfatt_sd.phases import StepReuse, reused_steps
from elfatt_sd.plans import taken
from elfatt_sd.runtime.layer import fitted
from elfatt_sd.toy.renderer import sample_prompts
from elfatt_sd.tuning.model import Choice, Predictor, psnr_of
from elfatt_sd.tuning.probe import Candidate, LayerFigures, Probe, stretches_of
from elfatt_sd.tuning.proof import Budget, Compare, Measure, Metric, Point, Promise, Proof, check_wanted, measure_named
from elfatt_sd.tuning.runs import Drawn, DrawSettings, Runs, Sample, Store, embedded_name, fingerprint, short_hash
from elfatt_sd.tuning.tuned import UNTOUCHED, Tuned

SEARCHED, IMAGES = 3, 24  # images of the search, and of the proof at most
PRESETS = ("elfatt", "elfatt-fast", "elfatt-quality")
STRETCHES, LEAST_STEPS = 5, 4  # of a run at most, and steps of each at least, so that they can share
WAYS = ((2, 1), (2, 0), (3, 1))  # to take over from earlier steps: one of so many is whole, and the order
ENDING = 4  # steps at the end of a run that are whole, as solvers of several steps may want it
EARLIER = 3  # whole steps before those that take over; as many as the highest order needs
CALIBRATED = 2  # images in which the stretches of a choice are approximated alone
EXPECTED = 3  # images that say as much of how far predictions are off as is expected: nothing
TRIES = 2  # choices that are run with the prompts of the search
ALIKE = 0.5  # dB between two predictions that are not worth a run each
WORTH = 1.03  # times as fast as something else, below which nothing is worth its while
AIMED = 1.03  # times the speed that was asked for, as times differ by some percent
STARTS = 35.0  # dB predicted, where closeness is measured by something else
RETIMED = 2  # held-out images of which the untouched one is drawn again to time a further configuration
SURE = 3.3  # standard errors of the mean of all held-out images, by which more than was asked for is aimed at
SURE_OF_EACH = 2.0  # standard deviations of images, likewise where every image is to be as close
SPREAD, SPREAD_KNOWN = 6.0, 4  # dB by which images differ, and how many images say as much as that is expected
LEAST_SLOPE = 0.3  # dB of held-out images for each that is predicted, of which corrections make use
NEAR = 3.0  # dB above what was aimed at, at which a faster choice is looked for
LEAST_LACK = 1.0  # dB that a choice is closer than one that was not proved
SHARES = (0.5, 0.25, 0.25)  # of the error that a promise may have, for the first choice that is proved, and the next
_EFFECTS = 1.5  # untouched images that the effects of layers on the denoiser's output may cost
_GIVEN = {"prompt", "generator", "num_inference_steps", "output_type", "return_dict", "num_images_per_prompt"}
_FIGURES = 7  # version of what is measured
_COMPARED = 2  # images of the search that presets are run with


def tune(
    pipe: Any,
    *,
    closeness: float | None = None,
    speed: float | None = None,
    memory: float | None = None,
    lowest: float | None = None,
    confidence: float = 0.9,
    prompts: Sequence[str] | None = None,
    metric: Metric | Compare = "psnr",
    weights: str | os.PathLike[str] | None = None,
    steps: int | None = None,
    guidance: float | None = None,
    height: int | None = None,
    width: int | None = None,
    frames: int | None = None,
    negative_prompt: str | None = None,
    seed: int = 0,
    images: int = IMAGES,
    presets: bool = True,
    reuse: bool = True,
    inputs: Mapping[str, Any] | None = None,
    progress: Tell | None = None,
) -> Tuned:
    """Find the fastest settings that are as close to the untouched image as asked, or the closest that are as fast.

    The pipeline runs untouched, with its layers watched; then in choices that are predicted to fit; then, untouched and
    tuned in turn, with images that were not used before, until these say that the budget is kept, or that it is not.
    It is as it was before afterwards, also after an exception. What was measured is kept on the disk: tuning goes on
    where it was stopped. See docs/tuning.md.

    Args:
        pipe: a diffusers pipeline with a UNet or a transformer of a known family.
        closeness: wanted mean closeness: PSNR in dB at least, or what `metric` gives. It is kept where the lower
            confidence bound of the mean over images is as close.
        speed: wanted speed: times as fast as the untouched pipeline, likewise by its lower bound.
        memory: GiB at the peak of an image at most, which a GPU counts.
        lowest: wanted closeness of the worst of `images` images, all of which are then drawn.
        confidence: probability with which a promise holds, above 0.5 and below 1.
        prompts: two or more, such as you use; by default those of the embedded pipelines, or a list of photographs.
            A random order decides which serve the search, and which the proof.
        metric: `psnr`, `ssim`, `lpips`, `dists`, or a function of two PIL images, of which a higher value is closer.
        weights: for LPIPS and DISTS, torchvision's file of the network that it compares features of.
        steps: denoising steps; the pipeline's own by default.
        guidance: guidance scale; the pipeline's own by default.
        height: of the image in pixels; the pipeline's own by default.
        width: likewise.
        frames: of a clip; the pipeline's own by default.
        negative_prompt: what guidance leads away from.
        seed: of the first image; the next ones count up.
        images: images that the proof may draw at most, 8 or more. They are drawn until it is decided.
        presets: also run the presets, for the curve.
        reuse: also let steps take over from earlier ones; see `StepReuse`.
        inputs: further arguments of the pipeline's call, such as an image.
        progress: told of every stage: its name, the denoising steps done in it and in all.

    Returns:
        The settings, with what was measured and what is promised.

    Raises:
        ElfattError: a budget that makes no sense, fewer than two prompts, or a pipeline that cannot be tuned.
        ElfattFailure: a speed that no choice has, or none that is as close as asked.
    """
    main_denoiser(pipe)
    if not {"prompt", "num_inference_steps"} <= taken(pipe).keys():
        raise ElfattError(f"a {type(pipe).__name__} cannot be tuned; give a pipeline that is called with a prompt.")
    budget = Budget(closeness, speed, memory, lowest, confidence)
    check_run(steps, guidance, seed, height, width)
    check_wanted(budget, metric, prompts, images, frames)
    if memory is not None and memory_counters(pipe._execution_device) is None:
        raise ElfattError(f"memory={memory:g} is not accepted; only a GPU counts the memory of an image.")
    if not isinstance(inputs or {}, Mapping):
        raise ElfattError(f"inputs={inputs!r} is not accepted; give a dict.")
    for name in inputs or ():
        checks.choice("input", name, taken(pipe).keys() - _GIVEN)
    measure = measure_named(metric, weights, str(pipe._execution_device))
    own_steps, own_guidance, own_prompts = _own(pipe)
    words = [*(own_prompts if prompts is None else prompts)]
    random.Random(0).shuffle(words)  # a list may begin with what is easy, and the first images may do
    samples = [Sample(words[number % len(words)], seed + number) for number in range(SEARCHED + images)]
    steps, guidance = own_steps if steps is None else steps, own_guidance if guidance is None else guidance
    settings = DrawSettings(steps, guidance, height, width, frames, negative_prompt, inputs or {})
    check_steps(pipe, steps)
    settings.check(pipe)
    tell_cut_prompts(pipe, [*(sample.prompt for sample in samples), negative_prompt or ""])
    with restored(pipe):
        known = [(name, method_named(name)) for name in PRESETS if presets]
        known += [("as it was", replace(patch.config, origin={})) for patch in [*patches_of(pipe).values()][:1]]
        remove_patch(pipe)
        runs, start = Runs(pipe, settings, progress), time.monotonic()
        record = _record(runs)
        store = Store(record | {"samples": samples[:SEARCHED], "figures": _FIGURES})
        search = Search(runs, samples, budget, measure, store, reuse)
        search.measure_untouched()
        search.measure_layers()
        for name, config in known:
            compared = search.samples[:_COMPARED]
            runs.stage(f"running {name}", len(compared))
            try:
                search.run_config(name, config, None, compared)
            except ElfattError as error:  # it does not go with this pipeline
                warnings.warn(f"elfatt-sd: {name} is left out of the curve: {error}", stacklevel=2)
        proof = search.prove(search.settle())
        record |= {"calls": search.calls, "first": search.begin + 1}
        chosen = proof and proof.point
        points = [one if one is chosen or one.name != "tuned" else replace(one, name="tried") for one in search.points]
        return Tuned(
            config=UNTOUCHED if proof is None else proof.with_origin(pipe, budget, record),
            budget=budget,
            measure=measure,
            proof=proof,
            nearest=max(search.proofs, key=lambda each: measure.sign * each.bound, default=None),
            points=tuple(points),
            curve=tuple(search.curve),
            untouched_seconds=search.seconds,
            floor=search.floor,
            images=(time.monotonic() - start) / search.seconds,
            record=record,
        )


def _own(pipe: Any) -> tuple[int, float | None, list[str]]:
    """Return the steps, the guidance scale and the prompts of a model, where nobody gives others."""
    if embedded := embedded_name(pipe):
        return (*own_settings(pipe, embedded), sample_prompts(32, 1))
    prompts = [prompt for _, prompt in read_prompts(PromptFile("images"))]
    return (*own_settings(pipe, ""), prompts[:: len(prompts) // 16])


def _record(runs: Runs) -> dict[str, Any]:
    """Return what the figures are of: model, settings, machine and versions."""
    pipe, settings = runs.pipe, {**vars(runs.settings), "inputs": dict(runs.settings.inputs)}
    for name, value in settings["inputs"].items():
        text = value if isinstance(value, int | float | str) else str(type(value))
        settings["inputs"][name] = short_hash(value.tobytes()) if hasattr(value, "tobytes") else text
    scheduler = {name: value for name, value in pipe.scheduler.config.items() if not name.startswith("_")}
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    return {
        "pipeline": type(pipe).__name__,
        "model": embedded_name(pipe) or str(getattr(pipe.config, "_name_or_path", "")),
        "weights": {name: fingerprint(part) for name, part in parts.items()},
        "scheduler": {"class": type(pipe.scheduler).__name__, **scheduler},
        "settings": settings,
        "device": device_name(runs.device),
        "threads": torch.get_num_threads(),
        "dtype": str(pipe.dtype).removeprefix("torch."),
        "attentions": sorted(attentions()),
        "versions": versions(),
    }


class Search:
    """Tunes one pipeline: measures, predicts, tries choices, and has them proved."""

    def __init__(
        self, runs: Runs, samples: Sequence[Sample], budget: Budget, measure: Measure, store: Store, reuse: bool = True
    ) -> None:
        self.runs, self.budget, self.measure, self.store, self.reuse = runs, budget, measure, store, reuse
        self.samples, self.held_out = samples[:SEARCHED], samples[SEARCHED:]
        self.held_out_untouched: dict[int, Drawn] = {}  # by number
        self.proofs: list[Proof] = []
        self.points: list[Point] = []  # what was run, in order
        self.curve: list[Choice] = []  # the best choices by what is known so far
        self.realised = 1.0  # fraction of the predicted seconds that is really saved

    def measure_untouched(self) -> None:
        """Draw the untouched images of the search; the first one twice, and also where it is kept."""
        self.runs.stage("drawing untouched images", len(self.samples) + 1)
        first, *others = self.samples
        recorded = self.runs.draw_recorded(first)
        drawn = self.store.drawn(first, lambda: recorded)
        again = self.runs.draw(first)
        self.floor = math.inf if recorded.same(again) else self.measure.between(recorded, again)
        near = measure_named("psnr").between
        alike = self.floor < math.inf and near(drawn, recorded) >= near(recorded, again) - NEAR
        if not drawn.same(recorded) and not alike:  # another model made what is kept
            shutil.rmtree(self.store.folder, ignore_errors=True)
            drawn = self.store.drawn(first, lambda: recorded)
        more = (self.store.drawn(each, functools.partial(self.runs.draw_recorded, each)) for each in others)
        self.untouched: list[Drawn] = [drawn, *more]
        fresh = drawn.seconds == recorded.seconds  # seconds that are kept are those of another time
        self._seconds = [again.seconds, *(each.seconds for each in self.untouched[1:] if fresh)]  # the first warms up
        self.seconds = statistics.median(self._seconds)  # of an untouched image
        kept = ((number, self.store.drawn(sample)) for number, sample in enumerate(self.held_out))
        self.held_out_untouched |= {number: image for number, image in kept if image is not None}
        self._pace = self.runs.pace()  # seconds of a step at that time
        self.calls, self.begin = len(self.runs.pipe.scheduler.timesteps), begin_of(self.runs.pipe)

    def measure_layers(self) -> None:
        """Measure every approximation in every layer, and what a layer's error does to the image."""
        count = max(1, min(STRETCHES, (self.calls - self.begin) // LEAST_STEPS))
        self.stretches = stretches_of(self.calls, count, self.begin)
        self.runs.stage("measuring layers", 1)
        figures = self.store.known("layers", self._probe, LayerFigures.read)
        share, exact_start = self.budget.memory is None, self.budget.lowest is not None and len(self.stretches) > 1
        self.model = Predictor(figures, self.stretches, share=share, exact_start=exact_start)
        self._calibrate("stretches", 0, map(self.model.reference, range(len(self.stretches))))
        if self.reuse and share and len(self.stretches) > 1:
            main = unwrap(main_denoiser(self.runs.pipe))
            self._calibrate_reuse(0, [*self._ways([OUTPUT, *family_of(main).cuts(main)[:1]])])

    def _ways(self, cuts: Sequence[str]) -> Iterator[tuple[int, StepReuse]]:
        """Yield what stretches can take over, gentler ways first; the first stretch never does."""
        for number, stretch in list(enumerate(self.stretches))[1:]:
            ending = ENDING - (self.calls - 1 - stretch.last)  # of its steps
            for cut, (every, order) in itertools.product(cuts, WAYS):
                whole = StepReuse(1.0, cut, every, order, 0, 0)
                if order and len(stretch) >= 2 * LEAST_STEPS:
                    yield number, replace(whole, first=len(stretch) // 2)
                if order and 0 < ending < len(stretch):
                    yield number, replace(whole, last=ending)
                yield number, whole

    def _spared(self, number: int, reuse: StepReuse) -> bool:
        """Tell whether a way need not be drawn: a gentler one is far too far, or one as fast is close enough."""
        wanted = [each for each in (self.budget.closeness, self.budget.lowest) if each is not None]
        if self.measure.name != "PSNR" or not wanted:
            return False
        line = replace(reuse, order=1)
        as_fast = {line, replace(line, cut=OUTPUT)} - {reuse}
        for (place, own), drawn in self.model.reused.items():
            gentler = own.cut == reuse.cut and own.every <= reuse.every
            gentler = gentler and own.first >= reuse.first and own.last >= reuse.last
            close, far = psnr_of(drawn[0][1]), min(wanted) - SPREAD
            if place == number and ((gentler and close < far) or (own in as_fast and close >= max(wanted) + NEAR)):
                return True
        return False

    def _calibrate_reuse(self, image: int, options: Sequence[tuple[int, StepReuse]]) -> None:
        """Draw an image with one stretch alone taking over from earlier steps, in one way after the other."""
        self.runs.stage("measuring reuse", sum(1 - self.stretches[number].first / self.calls for number, _ in options))
        for number, reuse in options:
            config = self.model.config([{}] * len(self.stretches), {number: reuse}, name="probe")
            if not any(reused_steps(config.reuse, self.calls)):  # the stretch is too short
                continue
            draw = functools.partial(self._draw_reused, self.samples[image], config)
            name = f"reuse-{short_hash(config.to_dict(), 12)}-{image}"
            found = self.store.known(name, None if not image and self._spared(number, reuse) else draw, tuple)
            if found is not None:
                self.model.reused.setdefault((number, reuse), {})[image] = found
        self.curve = self.model.curve()

    def _draw_reused(self, sample: Sample, config: PatchConfig) -> tuple[float, float]:
        """Return the seconds that an image saves in which steps take over from earlier ones, and its error."""
        plan = reused_steps(config.reuse, self.calls)
        begin = max(self.begin, next(step for step, each in enumerate(plan) if each is not None) - EARLIER)
        with CallTimer(step_denoisers(self.runs.pipe).values(), self.runs.device) as timer:
            mse = self.runs.deviation(begin, sample, config)
        seconds = timer.each()
        calls = max(1, -(-len(seconds) // (self.calls - self.begin)))  # of a step
        places = ((self.begin + place // calls, each) for place, each in enumerate(seconds))
        steps = [(plan[step], each) for step, each in places if step >= begin]
        taken, whole = ([each for now, each in steps if (now is not None) == reuses] for reuses in (True, False))
        return len(taken) * (statistics.median(whole) - statistics.median(taken)) if taken and whole else 0.0, mse

    def _probe(self) -> Any:
        effects, scale = round(_EFFECTS * (self.calls - self.begin)), self.runs.settings.guidance
        probe = Probe(self.runs.pipe, self.stretches, effects=effects, scale=scale)
        with probe, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.runs.draw(self.samples[0])
        return {name: own.to_dict() for name, own in probe.figures.items()}

    def _calibrate(self, what: str, image: int, parts: Iterable[Mapping[str, Candidate]]) -> None:
        """Draw an image with one stretch after the other approximated alone, and see what each does to it."""
        self.runs.stage(f"measuring {what}", sum(1 - stretch.first / self.calls for stretch in self.stretches))
        for number, phases in enumerate(parts):
            alone = [phases if each == number else {} for each in range(len(self.stretches))]
            config = self.model.config(alone, name="probe")
            if config.active:
                name = f"alone-{short_hash(config.to_dict(), 12)}-{image}"
                step, sample = self.stretches[number].first, self.samples[image]
                draw = functools.partial(self.runs.deviation, step, sample, config)
                self.model.calibrate(number, image, self.store.known(name, draw, float), phases)
        self.model.fit()
        self.curve = self.model.curve()

    def run_config(self, name: str, config: PatchConfig, predicted: float | None, samples: Sequence[Sample]) -> Point:
        """Draw images of the search with a configuration, each timed against a step of the untouched pipeline."""
        paces = [self.runs.pace()]
        drawn = [self.runs.draw(sample, config) for sample in samples]
        seconds = [each.seconds for each in drawn]
        paces.append(self.runs.pace())
        slower = statistics.fmean(paces) / self._pace  # than when the untouched ones were drawn
        close = tuple(self.measure.between(*pair) for pair in zip(self.untouched, drawn, strict=False))
        speed = tuple(slower * self.seconds / each for each in seconds)
        self.points.append(Point(name, config, predicted, close, speed, busy([self._seconds, paces, seconds])))
        return self.points[-1]

    def _learn_speed(self, point: Point, choice: Choice) -> None:
        """Learn what part of the predicted seconds a run really saves."""
        self.realised = min(1.5, max(0.2, self.seconds * (1 - 1 / point.times) / max(choice.saved, 1e-9)))

    # How a choice is made.

    def choose(self) -> Choice:
        """Return the best choice for the budget by what is known so far."""
        if not self.budget.by_speed:
            choice = self._at(self._predicted_for(self._aim()))
            if self._times(choice) >= WORTH or self.budget.closeness is None:
                return choice
            worth = [each for each in self.curve if self._times(each) >= WORTH]
            return max(worth, key=lambda each: each.psnr, default=choice)  # it may be as close, or the nearest
        aimed = max([AIMED, *(proof.point.times / proof.speed_bound for proof in self.proofs)])
        wanted = self.seconds * (1 - 1 / (aimed * (self.budget.speed or 1.0))) / self.realised
        enough = [choice for choice in self.curve if choice.saved >= wanted]
        return min(enough, key=lambda choice: choice.mse, default=self.curve[-1])

    def _aim(self) -> float:
        """Return the mean closeness at which the held-out images are likely to promise what was asked for."""
        values = max((point.closeness for point in self.points), key=len, default=())
        known = [value for value in values if math.isfinite(value)]
        expected = SPREAD_KNOWN if self.measure.name == "PSNR" else 0
        squares = expected * SPREAD**2 + len(known) * statistics.pvariance(known or [0.0])
        spread = math.sqrt(squares / max(1, expected + len(known) - 1))
        sign, aims = self.measure.sign, []
        if self.budget.closeness is not None:
            aims.append(sign * self.budget.closeness + SURE * spread / math.sqrt(len(self.held_out)))
        if self.budget.lowest is not None:
            aims.append(sign * self.budget.lowest + SURE_OF_EACH * spread)
        return sign * max(aims)

    def _at(self, psnr: float) -> Choice:
        return max((choice for choice in self.curve if choice.psnr >= psnr), key=lambda choice: choice.saved)

    def _times(self, choice: Choice) -> float:
        return self.seconds / max(1e-3 * self.seconds, self.seconds - self.realised * choice.saved)

    def _predicted_for(self, asked: float) -> float:
        """Return the predicted PSNR at which a closeness is to be expected."""
        if self.measure.name == "PSNR":
            return asked - self._offset()
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

    def _offset(self) -> float:
        """Return by how much images are closer than predicted, drawn towards nothing."""
        known = ((one.mean - one.predicted, len(one.closeness)) for one in self.points if one.predicted)
        pairs = [(off, images) for off, images in known if math.isfinite(off)]
        return sum(off * images for off, images in pairs) / (EXPECTED + sum(images for _, images in pairs))

    def _corrected(self, choice: Choice, proof: Proof) -> Choice | None:
        """Return the choice to prove after another one; None where nothing is to be gained."""
        self._learn_speed(proof.point, choice)
        budget, holds = self.budget, proof.holds(self.budget)
        if budget.by_speed:
            following = self.choose()
            return None if holds or following is choice else following
        if self.measure.name != "PSNR":
            return None if holds else self._at(choice.psnr + 3.0)
        aim, mean = self._aim(), proof.point.mean
        if budget.keeps(self.measure, proof.bound, proof.lowest):  # what is asked for is not speed
            room = min(mean, choice.psnr + self._offset()) - aim
            following = self._at(choice.psnr - room + NEAR / 2) if NEAR < room < math.inf else choice
        else:
            lacks = max(aim - mean, -math.inf if budget.lowest is None else budget.lowest - proof.lowest)
            known = [(each.point.predicted, each.point.mean) for each in self.proofs]
            proved = [(predicted, mean) for predicted, mean in known if predicted is not None and math.isfinite(mean)]
            slope = 1.0  # dB of held-out images for each that is predicted, by the last two proofs
            if len(proved) > 1 and proved[-1][0] != proved[-2][0]:
                slope = (proved[-1][1] - proved[-2][1]) / (proved[-1][0] - proved[-2][0])
            following = self._at(choice.psnr + max(LEAST_LACK, lacks / min(1.0, max(LEAST_SLOPE, slope))))
        return None if following.psnr == choice.psnr else following

    # What is run and proved.

    def settle(self) -> Choice:
        """Return the fastest choice that keeps to the budget by runs of the search's images; untouched if none does."""
        for image in list(range(len(self.samples)))[-CALIBRATED:]:  # images differ much, and so do choices
            self._calibrate("a choice", image, self.model.parts(self.choose()))
            taken = [(number, each.reuse) for number, each in enumerate(self.choose().reuse) if each.reuse is not None]
            if taken:
                self._calibrate_reuse(image, taken)
        choice, tried = self.choose(), list[float]()  # by predicted PSNR
        while len(tried) < TRIES and choice.saved > 0 and all(abs(choice.psnr - one) > ALIKE for one in tried):
            self.runs.stage(f"trying {choice.psnr:.1f} dB predicted", len(self.samples))
            tried.append(choice.psnr)
            self._learn_speed(self.run_config("tuned", self.model.chosen(choice), choice.psnr, self.samples), choice)
            choice = self.choose()
            fastest = max((rival.times for rival in self._rivals()), default=0.0)
            if not self.budget.by_speed and fastest * WORTH >= self._times(choice):
                break
        return choice

    def _rivals(self) -> list[Point]:
        """Return what is there to compare with, as far as it is likely to keep to the budget."""
        budget, measure = self.budget, self.measure
        return [
            each
            for each in self.points
            if each.predicted is None
            and budget.keeps(measure, each.mean, measure.lowest(each.closeness), each.times)
            and (budget.by_speed or measure.keeps(each.mean, self._aim()))
        ]

    def prove(self, choice: Choice) -> Proof | None:
        """Have a choice proved, and correct it until it holds; None where nothing that holds is worth its while."""
        best: Proof | None = None
        following: Choice | None = choice
        for left in reversed(range(len(SHARES))):  # the last proof is for what is there to compare with, if anything is
            if following is not None and following.saved <= 0:
                following = None
            proved, found = {proof.point.name for proof in self.proofs}, None if best is None else best.point
            rival = found  # the best that is there to compare with, where it betters what is proved
            for each in self._rivals():
                if each.name not in proved and each.times >= WORTH and (rival is None or self._betters(each, rival)):
                    rival = each
            rival, first = None if rival is found else rival, self.budget.by_speed  # where the choice comes first
            if rival and (not following or not left or (not first and rival.times >= self._times(following))):
                proof = self.prove_config(rival.name, fitted(rival.config, find_denoisers(self.runs.pipe)), None)
            elif following is not None and (best is None or self._times(following) > best.point.times):
                proof = self.prove_config("tuned", self.model.chosen(following), following.psnr)
            else:
                break
            if following is not None and proof.point.predicted is not None:
                following = self._corrected(following, proof)
            if proof.holds(self.budget) and (best is None or self._betters(proof.point, best.point)):
                best = proof
        if best is not None and best.point.times >= WORTH:
            return best
        if self.budget.speed is not None:
            near = max(self.proofs, key=lambda each: each.speed_bound, default=None)
            said = near and f"the nearest choice is promised {near.speed_bound:.2f} times as fast, and {near.words()}"
            said = f"cannot be promised on held-out images; {said or 'no choice is expected to be faster'}"
            raise ElfattFailure(f"{self.budget.words(self.measure)}: {said}. Ask for less.")
        return None

    def prove_config(self, name: str, config: PatchConfig, predicted: float | None) -> Proof:
        """Draw held-out images, until they say whether a configuration keeps to the budget.

        The untouched image is drawn in turn with the other where it is not known, and for some that are, or for all
        where speed is asked for, to time both.
        """
        promise = Promise(len(self.held_out), (1 - self.budget.confidence) * SHARES[len(self.proofs)])
        configs = {"untouched": None, "tuned": config}
        drawn: dict[str, dict[int, Drawn]] = {"untouched": self.held_out_untouched, "tuned": {}}
        timed: list[int] = []

        def take(turn: Turn) -> float:
            number = timed[turn.number]
            made = self.runs.draw(self.held_out[number], configs[turn.name])
            if turn.name == "untouched":
                self.store.drawn(self.held_out[number], lambda: made)
            drawn[turn.name][number] = made
            return made.seconds

        compared = Comparison([*configs], take)
        for look in promise.looks:
            numbers = range(len(drawn["tuned"]), look)
            again = range(look if self.budget.speed is not None else RETIMED)
            timed = [each for each in numbers if each in again or each not in drawn["untouched"]]
            self.runs.stage(f"proving {name}", len(numbers) + len(timed))
            compared.rounds = len(timed)
            compared.run()
            drawn["tuned"] |= {
                each: self.runs.draw(self.held_out[each], config) for each in numbers if each not in timed
            }
            untouched, tuned = ([images[number] for number in range(look)] for images in drawn.values())
            close = tuple(map(self.measure.between, untouched, tuned))
            speed = ratios(compared.times["untouched"], compared.times["tuned"])
            point = Point(name, config, predicted, close, speed, compared.busy())
            if len({b"".join(each.tobytes() for each in one.frames) for one in untouched}) < look:
                raise ElfattError("images of other seeds are the same, and prove nothing of others; give more prompts.")
            proof = Proof(point, self.held_out[:look], untouched, tuned, promise, self.measure, self.budget.confidence)
            if proof.holds(self.budget) or proof.hopeless(self.budget):
                break
        self.points.append(proof.point)
        self.proofs.append(proof)
        return proof

    def _betters(self, point: Point, other: Point) -> bool:
        """Tell which of two is better: the faster one or, where speed alone is asked for, the closer one."""
        if not self.budget.by_speed:
            return point.times > other.times
        return self.measure.keeps(point.mean, other.mean)
