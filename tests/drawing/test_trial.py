"""Every method from one seed: rows, recommendation, strip, and what an interruption leaves."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support import tiny_pipelines as tiny
from support.checks import set_clock

from elfatt_sd.config import METHODS, PatchConfig
from elfatt_sd.drawing.compare import Row, Trial, try_methods
from elfatt_sd.drawing.studio import Request, Studio
from elfatt_sd.errors import ElfattError

PROMPT = "a red star"
PICTURE = Image.new("RGB", (8, 8))


def trial_of(pipe: Any, *given: Any, steps: int = 2, **settings: Any) -> Trial:
    return Trial(Studio(pipe, Request((PROMPT,), PatchConfig.preset("sd"), steps=steps), Path()), *given, **settings)


def test_all_methods_are_drawn_interleaved_and_written(pipe: Any, tmp_path: Path) -> None:
    before = dict(pipe.unet.attn_processors)
    trial = trial_of(pipe, steps=6, rounds=2)
    seen: list[str] = []
    trial.run(lambda drawn: seen.append(drawn.name))
    assert len(seen) == trial.images == 2 * len(METHODS)
    assert seen[:2] == ["untouched, round 1 of 2", "tome, round 1 of 2"]
    assert seen[len(METHODS)] == "tome, round 2 of 2"  # another method begins
    assert pipe.unet.attn_processors == before
    assert [row.method for row in trial.rows] == list(METHODS)
    first, *others = trial.rows
    assert first.ratios == (1.0, 1.0) and first.psnr_db == math.inf
    assert all(row.psnr_db > 5 for row in others) and others[0].psnr_db < 100
    assert others[0].ratios == tuple(a / b for a, b in zip(first.times, others[0].times, strict=True))
    path = trial.write(tmp_path)
    record = json.loads(path.with_suffix(".json").read_text())
    assert [row["method"] for row in record["methods"]] == list(METHODS)
    assert record["recommendation"] == trial.recommendation()
    with Image.open(path) as strip:
        assert strip.width == 3 * 32 + 4 * 16


def test_a_single_round_can_have_ratios_to_untouched_before_and_after(pipe: Any, monkeypatch: Any) -> None:
    set_clock(monkeypatch, [2, 1, 3, 4])
    trial, seen = trial_of(pipe, ("tome", "agent"), rounds=1, again=True), list[str]()
    trial.run(lambda drawn: seen.append(drawn.name), warm_up=False)
    assert len(seen) == trial.images and seen[-1] == "untouched, again"
    assert [row.ratios for row in trial.rows] == [
        (1, 1),
        pytest.approx((2, 4)),
        pytest.approx((2 / 3, 4 / 3)),
    ]


def test_chosen_methods_from_python(pipe: Any) -> None:
    trial = try_methods(pipe, PROMPT, methods=("tome",), rounds=1, steps=2)
    assert [row.label for row in trial.rows] == ["untouched", "tome"]
    with pytest.raises(ElfattError, match="method='faster'"):
        try_methods(pipe, PROMPT, methods=("faster",), steps=2)


def test_an_interruption_keeps_what_is_finished(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = trial_of(pipe, rounds=2)
    assert trial.rows == []
    draw, left = trial.studio.draw, iter([1, 2])

    def third_is_interrupted(*shot: Any) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return draw(*shot)

    monkeypatch.setattr(trial.studio, "draw", third_is_interrupted)
    with pytest.raises(KeyboardInterrupt):
        trial.run()
    assert [row.method for row in trial.rows] == ["sd", "tome"]
    assert trial.rows[1].speed_text().count(".") == 1


@pytest.mark.filterwarnings("ignore:elfatt-sd. elfatt-fast approximates no step")
def test_a_method_that_changed_nothing_says_so(pipe: Any) -> None:
    pipe.scheduler = tiny.ddim()
    trial = try_methods(pipe, PROMPT, methods=("elfatt-fast",), rounds=1, steps=1)
    row = trial.rows[1]
    assert row.unchanged == (
        "identical: elfatt-fast changed nothing in this run, of which it approximates no step; give more steps"
    )
    assert "identical" in row.caption()[1]
    assert trial.recommendation().startswith("No method changed the image")


UNTOUCHED = Row("sd", PICTURE, (2.0,), (1.0,), math.inf)
CLOSE = Row("elfatt", PICTURE, (1.5,), (1.3,), 35.0)
FAST = Row("elfatt-fast", PICTURE, (1.0,), (2.0,), 25.0)
SLOW = Row("tome", PICTURE, (2.5,), (0.8, 1.2), 40.0)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([UNTOUCHED, CLOSE, FAST, SLOW], "Use elfatt (1.30 times as fast, PSNR 35.0 dB): the closest to untouched of"),
        ([UNTOUCHED, FAST], "those that were faster in every round, and the fastest."),
        ([UNTOUCHED, SLOW], "Leave the pipeline untouched at this size"),
        ([UNTOUCHED, dataclasses.replace(SLOW, ratios=(0.8, 1.4))], "No recommendation: no method was faster in every"),
        ([UNTOUCHED, dataclasses.replace(CLOSE, unchanged="identical")], "No method changed the image in this run"),
        ([UNTOUCHED, dataclasses.replace(FAST, fault="is black"), CLOSE], "Use elfatt (1.30 times as fast"),
        (
            [dataclasses.replace(UNTOUCHED, times=(19.0, 11.0)), CLOSE, FAST],
            "No recommendation: the machine was busy: equal runs took 11.00 to 19.00 s",
        ),
    ],
)
def test_recommendations(monkeypatch: pytest.MonkeyPatch, pipe: Any, rows: list[Row], says: str) -> None:
    monkeypatch.setattr(Trial, "rows", rows)
    trial = trial_of(pipe)
    trial.times.update({row.method: list(row.times) for row in rows})
    assert says in trial.recommendation()


def test_captions() -> None:
    assert UNTOUCHED.caption() == ("untouched, 2.00 s", "")
    assert SLOW.caption() == ("tome, 2.50 s", "1.00 (0.80 to 1.20) times as fast, PSNR 40.0 dB")
    assert SLOW.caption(busy=True)[1] == "machine busy, speed unknown, PSNR 40.0 dB"
    assert dataclasses.replace(FAST, fault="is black").caption()[1] == "2.00 times as fast, no image"
