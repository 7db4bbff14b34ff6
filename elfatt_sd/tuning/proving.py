"""Prove a choice on held-out images, in turn with the untouched pipeline, and correct it until it holds there."""

from __future__ import annotations

import math

from elfatt_sd.choosing import fitted
from elfatt_sd.config import PatchConfig
from elfatt_sd.errors import ElfattFailure
from elfatt_sd.families import find_denoisers
from elfatt_sd.measuring.clock import busy
from elfatt_sd.tuning.model import Choice
from elfatt_sd.tuning.points import Point, Proof
from elfatt_sd.tuning.runs import Drawn, closeness
from elfatt_sd.tuning.search import WORTH, Search

PROOFS = 3  # choices that are run with the held-out prompts
LEAST_SLOPE = 0.3  # dB of held-out images for each that is predicted, of which corrections make use
NEAR = 2.0  # dB above what was asked for at which a faster choice is looked for
RETIMED = 2  # held-out images of which the untouched one is drawn again to time a corrected choice


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
            if rival is not None and (following is None or self._is_ahead(rival, following)):
                proof = self._proof(rival.name, fitted(rival.config, find_denoisers(self.runs.pipe)), None)
            elif following is not None and (best is None or self.search.times(following) > best.point.times):
                proof = self._proof("tuned", self.search.model.config(following), following.psnr)
                following = self._corrected(following, proof)
            else:
                break
            best = self._better(best, proof)
        return best if best is not None and best.point.times >= WORTH else None

    def _rival(self, best: Proof | None) -> Point | None:
        proved = {proof.point.name for proof in self.proofs}
        rivals = (each for each in self.search.rivals() if each.name not in proved and each.times >= WORTH)
        rival = best.point if best is not None else None
        for each in rivals:
            rival = each if rival is None or self._betters(each, rival) else rival
        return None if best is not None and rival is best.point else rival

    def _is_ahead(self, rival: Point, choice: Choice) -> bool:
        return self.budget.closeness is not None and rival.times >= self.search.times(choice)

    def _proof(self, name: str, config: PatchConfig, predicted: float | None) -> Proof:
        """Draw the held-out images; the untouched ones in turn with the others, the first time."""
        samples, untouched = self.search.held_out, self._untouched
        timed = RETIMED if untouched else len(samples)
        self.search.say(f"proving {name}", len(samples) + timed)
        tuned, speed = [], []
        for number, sample in enumerate(samples):
            if number < timed:
                untouched[number : number + 1] = [self.runs.draw(sample)]
            tuned.append(self.runs.draw(sample, config))
            if number < timed:
                speed.append(untouched[number].seconds / tuned[-1].seconds)
        close = [closeness(self.measure, before, after) for before, after in zip(untouched, tuned, strict=True)]
        told = busy([each.seconds for each in drawn[:timed]] for drawn in (untouched, tuned))
        point = Point(name, config, predicted, tuple(close), tuple(speed), told)
        self.search.points.append(point)
        self.proofs.append(Proof(point, samples, list(untouched), tuned, self.measure.higher))
        return self.proofs[-1]

    def _better(self, best: Proof | None, proof: Proof) -> Proof | None:
        return proof if self._holds(proof) and (best is None or self._betters(proof.point, best.point)) else best

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
            following = self.search.fast(self.budget.speed or 1.0)
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
