"""Untouched compared with other methods: rows, recommendation, strip and sheet, and the pictures that they are of."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support import tiny_pipelines as tiny
from support.checks import counting, set_clock

from elfatt_sd.config import METHODS, PatchConfig
from elfatt_sd.drawing import compare
from elfatt_sd.drawing.compare import PAPER, MethodResult, Sheet, Trial, chosen, psnr, side_by_side, try_methods
from elfatt_sd.drawing.studio import Request, Studio, fault_of
from elfatt_sd.errors import ElfattError

PROMPT = "a red star"
IMAGE = Image.new("RGB", (8, 8))
UNTOUCHED = MethodResult("sd", IMAGE, (2.0,), (1.0,), math.inf)
CLOSE = MethodResult("elfatt", IMAGE, (1.5,), (1.3,), 35.0)
FAST = MethodResult("elfatt-fast", IMAGE, (1.0,), (2.0,), 25.0)
SLOW = MethodResult("tome", IMAGE, (2.5,), (0.8, 1.2), 40.0)
SLOWEST = MethodResult("agent", IMAGE, (4.0,), (0.5,), 60.0)
OTHER = MethodResult("agent", IMAGE, (0.5,), (4.0,), 12.0)  # another image
SAME = replace(CLOSE, unchanged="identical")
BROKEN = replace(FAST, fault="is black")


def trial_of(pipe: Any, *given: Any, steps: int = 2, **settings: Any) -> Trial:
    return Trial(Studio(pipe, Request((PROMPT,), PatchConfig.preset("sd"), steps=steps), Path()), *given, **settings)


def test_all_methods_are_drawn_interleaved_and_written(pipe: Any, tmp_path: Path) -> None:
    before = dict(pipe.unet.attn_processors)
    trial, seen = trial_of(pipe, steps=6, repeats=2), list[str]()
    trial.run(lambda said, fault: seen.append(said.partition(":")[0]))
    assert len(seen) == trial.images == 2 * len(METHODS)
    assert seen[:2] == ["untouched, round 1 of 2", "tome, round 1 of 2"]
    assert seen[len(METHODS)] == "tome, round 2 of 2"  # another method begins
    assert pipe.unet.attn_processors == before
    first, *others = trial.rows
    assert first.ratios == (1.0, 1.0) and first.psnr_db == math.inf
    assert all(row.psnr_db > 5 for row in others) and others[0].psnr_db < 100
    path = trial.write(tmp_path)
    record = json.loads(path.with_suffix(".json").read_text())
    assert [row["method"] for row in record["methods"]] == list(METHODS)
    assert record["recommendation"] == trial.recommendation()
    with Image.open(path) as strip:
        assert strip.width == 3 * 32 + 4 * 16


def test_a_single_round_can_have_ratios_to_untouched_before_and_after(pipe: Any, monkeypatch: Any) -> None:
    set_clock(monkeypatch, [2, 1, 3, 4])
    trial, seen = trial_of(pipe, ("tome", "agent"), repeats=1, again=True), list[str]()
    trial.run(lambda said, fault: seen.append(said), warm_up=False)
    assert len(seen) == trial.images and seen[-1] == "untouched, again: 4.00 s"
    assert [row.ratios for row in trial.rows] == [(1, 1), pytest.approx((2, 4)), pytest.approx((2 / 3, 4 / 3))]


@pytest.mark.filterwarnings("ignore:elfatt-sd. elfatt-fast approximates no step")
def test_from_python_a_method_that_changed_nothing_says_so(pipe: Any) -> None:
    pipe.scheduler = tiny.ddim()
    trial = try_methods(pipe, PROMPT, methods=("elfatt-fast",), repeats=1, steps=1)
    untouched, row = trial.rows
    assert untouched.caption()[0].startswith("untouched, ") and row.caption()[1].endswith(" times as fast, identical")
    assert row.unchanged.endswith("changed nothing in this run, of which it approximates no step; give more steps")
    assert trial.recommendation().startswith("No method changed the image")
    with pytest.raises(ElfattError, match="method='faster'"):
        try_methods(pipe, PROMPT, methods=("faster",), steps=2)
    with pytest.raises(ElfattError, match="repeats=0 is not accepted"):
        try_methods(pipe, PROMPT, repeats=0)


RECOMMENDED = (
    ((CLOSE, FAST, SLOW), "Use elfatt (1.30 times as fast, PSNR 35.0 dB): the closest to untouched of"),
    ((FAST,), "those that were faster in every round, and the fastest."),
    ((SLOW,), "Leave the pipeline untouched at this size"),
    ((SAME,), "No method changed the image in this run"),
    ((BROKEN, CLOSE), "Use elfatt (1.30 times as fast"),
    ((replace(CLOSE, times=(19.0, 11.0)), FAST), "No recommendation: the machine was busy: equal runs took 11.00"),
)
ON_A_SHEET: tuple[tuple[tuple[MethodResult, ...], list[MethodResult]], ...] = (
    ((SLOWEST, CLOSE, FAST), [FAST, CLOSE]),
    ((FAST,), [FAST]),
    ((SLOWEST,), [SLOWEST]),  # the fastest that there is, even if it is not faster
    ((OTHER, CLOSE), [CLOSE]),
    ((SAME,), []),
)


def test_what_is_recommended_and_what_is_on_a_sheet(monkeypatch: pytest.MonkeyPatch, pipe: Any) -> None:
    """On a sheet, the fastest and the closest of the faster ones."""
    for rows, says in RECOMMENDED:
        monkeypatch.setattr(Trial, "rows", [UNTOUCHED, *rows])
        trial = trial_of(pipe, [row.method for row in rows], again=True)
        trial.times.update({row.method: list(row.times) for row in trial.rows})
        assert says in trial.recommendation()
    for tried, shown in ON_A_SHEET:
        assert chosen([UNTOUCHED, *tried]) == [UNTOUCHED, *shown]


@pytest.mark.parametrize(("last", "told"), [(2.2, False), (6.0, True)])
def test_a_sheet_tells_of_a_busy_machine(pipe: Any, tmp_path: Path, monkeypatch: Any, last: float, told: bool) -> None:
    """The last untouched image of the second prompt takes longer than its equals."""
    monkeypatch.setattr(compare, "LEAST", 0.0)
    set_clock(monkeypatch, [*(9, 9, 2, 1, 2), *(2, 1, last)])  # the first prompt warms each method up
    drawn = counting(monkeypatch, compare, "side_by_side", lambda *given: given)
    own, seen = str(tmp_path / "own.json"), list[str]()
    PatchConfig.preset("tome", ratio=0.3).save(own)  # whose name is that of the preset
    assert [*trial_of(pipe, ["tome", own]).configs] == ["sd", "tome", f"tome, {own}"]
    sheet = Sheet(lambda request: pipe, ["toy"], ["a cat", "a dog"], ["sd", own], settings={"steps": 2})
    sheet.run(lambda said, fault: seen.append(said), lambda step, steps: None)
    assert len(seen) == sheet.images and seen[3].startswith("toy, a dog: untouched, round 1 of 1: 2.00 s")
    assert all(trial["methods"][1]["config"]["phases"][0]["ratio"] == 0.3 for _, trial in sheet.rows)
    sheet.write(tmp_path)
    summary, *busy = sheet.figures()
    fast = "machine busy, speed unknown" if told else "2.00 (2.00 to 2.20) times as fast"
    assert summary.startswith(f"toy, tome: {fast}, PSNR ")
    assert ["the machine was busy: equal runs took 2.00 to 6.00 s" in line for line in busy] == [True] * told
    [(_, captions, title, columns)] = drawn
    assert ["busy" in details for _, details in captions] == [False, told, False, told]
    assert ("busy" in title, columns) == (told, 2)


def noise(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (48, 64, 3), dtype=np.uint8))


def test_pictures_stand_in_rows_unchanged_with_their_texts_inside_their_column() -> None:
    pictures = [noise(seed) for seed in range(3)]
    sheet = side_by_side(pictures, [("a", "b"), ("w" * 200, "i" * 500), ("", "")], columns=2)
    size = (sheet.height - 16) // 2
    for number, picture in enumerate(pictures):
        left, top = 16 + number % 2 * 80, 16 + number // 2 * size
        assert np.array_equal(sheet.crop((left, top, left + 64, top + 48)), picture)
    ink = np.asarray(sheet).min(axis=2) < 200
    below = ink[64 : 16 + size]
    assert below[:, :80].any() and below[:, 96:160].any() and not ink[:, 160:].any()
    assert not ink[64 + size :].any(), "the third has no caption"
    blank = [Image.new("RGB", (120, 60), PAPER)] * 2
    none, two, many = (side_by_side(blank, [("", "")] * 2, title="word " * words) for words in (0, 9, 60))
    assert none.height < two.height == many.height and (np.asarray(many)[:, -10:] == 255).all()
    assert fault_of(np.asarray(none, dtype=float)).startswith("is of one colour")


def test_psnr_of_a_known_error_and_what_is_no_image() -> None:
    grey, lighter = Image.new("RGB", (8, 8), (100, 100, 100)), Image.new("RGB", (8, 8), (110, 110, 110))
    assert psnr(grey, lighter) == pytest.approx(20 * math.log10(255 / 10)) and psnr(grey, grey) == math.inf
    pixels = np.random.default_rng(0).uniform(0, 255, (2, 4, 4, 3))
    for given, says in (
        (pixels * 0, "is black: an overflow"),
        (pixels * 0 + 0.4, "is black"),
        (pixels * 0 + [7, 8, 9], "is of one colour"),
        (np.where(pixels == pixels.max(), math.nan, pixels), "is not finite"),
        (np.where(pixels == pixels.max(), math.inf, pixels), "is not finite"),
        (pixels, ""),
    ):
        assert fault_of(given).startswith(says) and bool(fault_of(given)) == bool(says)
    assert fault_of(np.zeros((1, 4, 4, 3)), flagged=True) == "is black: the safety checker"


def test_a_mean_of_few_images_has_no_interval() -> None:
    assert compare.closeness([40.0, 42.0]) == "PSNR in dB: 41.0 on average, lowest 40.0, of 2 images"
    many = "PSNR in dB: 41.0 on average (95 % interval 40.1 to 41.9), lowest 40.0, of 8 images"
    assert compare.closeness([40.0, 42.0] * 4) == many
