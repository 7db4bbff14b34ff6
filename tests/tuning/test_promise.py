"""What images promise of a mean and of the farthest image, without any model."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks import promise as simulated
from elfatt_sd.config import PatchConfig
from elfatt_sd.errors import ElfattError
from elfatt_sd.measure import student_quantile
from elfatt_sd.phases import StepReuse
from elfatt_sd.tuning import SEARCHED, Search
from elfatt_sd.tuning.model import Choice
from elfatt_sd.tuning.proof import Budget, Measure, Point, Promise, Proof, check_wanted, level_of_looks, measure_named
from elfatt_sd.tuning.runs import Drawn, Sample

GREY = Drawn((Image.new("RGB", (8, 8), "grey"),), 1.0, 2**30)


def proof(closeness: list[float], speed: list[float] | None = None, higher: bool = True, images: int = 24) -> Proof:
    count = len(closeness)
    point = Point("tuned", PatchConfig("sd"), None, tuple(closeness), tuple(speed or [2.0] * count))
    samples, drawn, measure = [Sample("a cat", each) for each in range(count)], [GREY] * count, measure_named("psnr")
    measure = Measure("PSNR", measure.compare, higher)
    return Proof(point, samples, drawn, drawn, Promise(images, 0.1), measure, 0.9)


def test_the_levels_of_looks() -> None:
    """One look has the error's own level; of more looks each has less, as in Pocock's table for two to five."""
    assert level_of_looks(0.1, (24,)) == pytest.approx(0.1, rel=0.03)
    for looks, level in ((2, 0.0294), (3, 0.0221), (5, 0.0158)):  # two-sided 0.05, large groups
        counts = tuple(1000 * each for each in range(1, looks + 1))
        assert level_of_looks(0.025, counts) == pytest.approx(level / 2, rel=0.05)
    assert level_of_looks(1e-5, (8, 12)) == 0.5e-5


def test_what_is_promised_holds() -> None:
    """In 88 % at least, by thousands of tunings of a published run's images and of skewed ones."""
    published, skewed = simulated.published(), simulated.skewed(np.random.default_rng(1))
    for name, pictures in ({"published": published} | skewed).items():
        assert simulated.false_promises(pictures, 1500 if name == "skewed to far" else 300) <= 0.12, name
    for pictures, asked in ((published, 35.0), (published, 45.0), (skewed["skewed to far"], 40.0)):
        figures = simulated.tunings(pictures, asked, 150)
        assert figures["promised"] > 0.85 and figures["false"] < 0.03 and figures["bound below mean"] > 0.9
        assert figures["images"] < 20 and figures["dB above"] < 8
    assert simulated.false_promises(simulated.Pictures([35.0], [np.zeros(64)]), 20) == 0
    loose = simulated.false_promises(skewed["normal"], 300, confidence=0.6)
    assert loose > simulated.false_promises(skewed["normal"], 300)


def test_a_bound_is_students_and_lower_with_skew() -> None:
    values = [30.0, 34.0, 36.0, 38.0, 40.0, 31.0, 37.0, 39.0]
    level = level_of_looks(0.1, Promise(24, 0.1).looks)
    plain = np.mean(values) - student_quantile(1 - level, 7) * np.std(values, ddof=1) / math.sqrt(8)
    assert plain - 1.5 < Promise(24, 0.1).bound(values) < plain
    far = [*values[:-1], 15.0]
    assert np.mean(far) - Promise(24, 0.1).bound(far) > 1.5 * (np.mean(values) - Promise(24, 0.1).bound(values))
    assert Promise(24, 0.1).bound([math.inf] * 8) == math.inf
    assert Promise(24, 0.1).bound([*values, math.inf]) == Promise(24, 0.1).bound([*values, 40.0]), "identical images"
    assert Promise(24, 0.1).looks == (8, 12, 16, 20, 24) and Promise(9, 0.1).looks == (9,)
    assert Promise(24, 0.1).excludes(22) == 0.1, "9.94 %, rounded up"


def test_when_it_is_decided() -> None:
    """The mean, every image, speed and memory: what holds, what is hopeless, and what needs more images."""
    close = [39.0, 40.0, 41.0, 42.0] * 2
    for budget, holds, hopeless in (
        (Budget(38), True, False),
        (Budget(40.2), False, False),
        (Budget(43), False, True),
        (Budget(38, lowest=39), False, False),  # not all images have been drawn
        (Budget(38, lowest=39.5), False, True),
        (Budget(lowest=38), False, False),
        (Budget(speed=1.9), True, False),
        (Budget(38, speed=2.1), False, True),
        (Budget(38, memory=1), True, False),
        (Budget(38, memory=0.5), False, True),
    ):
        assert (proof(close).holds(budget), proof(close).hopeless(budget)) == (holds, hopeless), budget
    assert proof(close * 3).holds(Budget(38, lowest=39))
    assert proof([math.inf] * 8).words() == "identical promised (90% confidence, 8 images)"
    assert proof([60.0, math.inf] * 4).words().endswith("mean 60.00 of the 4 that differ, lowest 60.00")
    assert proof([34.996] * 8).promised == "PSNR 34.99", "never rounded up"
    noisy = proof(close, [1.0, 3.0] * 4)
    assert not noisy.holds(Budget(speed=1.5)) and noisy.point.times > 1.5, "a speed is promised by its bound, too"
    distances = proof([0.1, 0.2] * 4, higher=False)
    assert distances.lowest == 0.2 and 0.15 < distances.bound < 0.25
    assert distances.holds(Budget(0.25)) and distances.hopeless(Budget(0.1))


@pytest.mark.parametrize("means", [[33], [27, 33], [27, 28, 33], [27, 28, 29]], ids=str)
def test_every_proof_may_go_to_a_choice(means: list[float]) -> None:
    """Where nothing is there to compare with: closer ones follow until one holds, the last of three included."""
    samples = [Sample("a cat", number) for number in range(SEARCHED + 24)]
    search = Search(SimpleNamespace(), samples, Budget(30), measure_named("psnr"), SimpleNamespace())
    search.seconds, search.model = 1.0, SimpleNamespace(chosen=lambda choice: PatchConfig("sd"))
    search.curve = [Choice({}, 0.9 - psnr / 100, 1.0, psnr) for psnr in range(30, 80)]

    def prove(name: str, config: PatchConfig, predicted: float | None) -> Proof:
        found = proof([means[len(search.proofs)] + each for each in (-1.0, 0.0, 1.0)] * 8)
        found = dataclasses.replace(found, point=dataclasses.replace(found.point, predicted=predicted))
        search.proofs.append(found)
        search.points.append(found.point)
        return found

    search.prove_config = prove
    assert search.prove(search.curve[4]) is (search.proofs[-1] if means[-1] == 33 else None)
    assert [each.point.mean for each in search.proofs] == means
    assert (predicted := [each.point.predicted for each in search.proofs]) == sorted({*predicted})


def test_ways_of_taking_over_that_others_settle_are_not_drawn() -> None:
    search = Search(SimpleNamespace(), [], Budget(40), measure_named("psnr"), SimpleNamespace())
    way = StepReuse(1.0, "output", 2, 1, 0, 0)
    changes: list[dict[str, Any]] = [{"every": 3}, {"order": 0}, {"cut": "shallow-1"}, {"first": 4}]
    others = [dataclasses.replace(way, **each) for each in changes]
    for close, stretch, spared in ((33, 1, "1100"), (39, 1, "0000"), (44, 1, "0110"), (33, 2, "0000")):
        search.model = SimpleNamespace(reused={(1, way): {0: (1.0, 255**2 / 10 ** (close / 10))}})
        assert "".join(str(int(search._spared(stretch, each))) for each in others) == spared, close
    search.budget = Budget(speed=2)
    assert not any(search._spared(1, each) for each in others), "no closeness says what is too far"


def test_the_worst_image_cannot_be_asked_closer_than_the_mean() -> None:
    with pytest.raises(ElfattError, match=r"lowest=0\.1 is not accepted; the worst image cannot be closer"):
        check_wanted(Budget(0.2, lowest=0.1), "lpips", None, 24, None)
