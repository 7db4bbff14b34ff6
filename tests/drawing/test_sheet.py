"""The sheet: which methods it shows, what it says of them, and its file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.checks import set_clock

from elfatt_sd.config import METHODS
from elfatt_sd.drawing import pictures
from elfatt_sd.drawing.compare import Row, Sheet, caption, chosen

IMAGE = Image.new("RGB", (8, 8))
UNTOUCHED = Row("sd", IMAGE, (2.0,), (1.0,), math.inf)
CLOSE = Row("tome", IMAGE, (1.6,), (1.25,), 40.0)
FAST = Row("elfatt-fast", IMAGE, (1.0,), (2.0,), 25.0)
SLOW = Row("agent", IMAGE, (4.0,), (0.5,), 60.0)


def test_fastest_and_closest_of_the_faster_ones_are_shown() -> None:
    assert chosen([UNTOUCHED, SLOW, CLOSE, FAST]) == [UNTOUCHED, FAST, CLOSE]
    assert chosen([UNTOUCHED, FAST]) == [UNTOUCHED, FAST]
    assert chosen([UNTOUCHED, SLOW]) == [UNTOUCHED, SLOW], "the fastest that there is, even if it is not faster"
    other = Row("agent", IMAGE, (0.5,), (4.0,), 12.0)  # another image
    assert chosen([UNTOUCHED, other, CLOSE]) == [UNTOUCHED, CLOSE]
    same = Row("tome", IMAGE, (1.0,), (2.0,), math.inf, "identical")
    assert chosen([UNTOUCHED, same]) == [UNTOUCHED]


def test_captions_give_ratios() -> None:
    assert caption(FAST, False) == ("elfatt-fast, 1.00 s", "2.00 times as fast, PSNR 25.0 dB")
    assert caption(FAST, True) == ("elfatt-fast, 1.00 s", "machine busy, speed unknown, PSNR 25.0 dB")
    assert caption(SLOW, False) == ("agent, 4.00 s", "not faster: 0.50 times as fast, PSNR 60.0 dB")


def test_sheet_is_drawn_and_written(pipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elfatt_sd.drawing.compare.chosen", lambda rows: [rows[0], *rows[1:3]])
    sheet = Sheet(lambda request: pipe, ["first", "second"], ["a cat", "a dog"], steps=2)
    names: list[str] = []
    sheet.run(lambda step, steps: None, lambda drawn: names.append(drawn.name))
    assert len(names) == sheet.images == 2 * (len(METHODS) + 1 + 4)
    assert names[0] == "first, a cat: untouched" and names[len(METHODS) + 1] == "first, a dog: untouched"
    assert names[len(METHODS)] == "first, a cat: untouched, again"
    assert [(line.model, line.prompt, len(line.rows)) for line in sheet.lines] == [
        (model, prompt, 3) for model in ("first", "second") for prompt in ("a cat", "a dog")
    ]
    said = list(sheet.summary())
    assert len(said) >= 4 and said[0].startswith("first, tome: ") and "(median of 2 prompts)" in said[0]
    path = sheet.write(tmp_path)
    assert len(json.loads(path.with_suffix(".json").read_text())["trials"]) == 4
    with Image.open(path) as image:
        assert image.width == 3 * 32 + 4 * 16


@pytest.mark.parametrize(("last", "told"), [(2.2, False), (6.0, True)])
def test_a_busy_machine_is_told_of(
    pipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: float, told: bool
) -> None:
    """The last untouched image of the second prompt takes longer than its equals."""
    monkeypatch.setattr("elfatt_sd.drawing.compare.LEAST", 0.0)
    first, second = [9, 9, 2, 1, 2], [2, 1, last]  # the first prompt warms each method up
    set_clock(monkeypatch, [*first, *second])
    captions: list[tuple[str, str]] = []
    titles: list[str] = []
    draw = pictures.side_by_side

    def keep(images: Any, written: Any, title: str, columns: int) -> Image.Image:
        captions.extend(written)
        titles.append(title)
        return draw(images, written, title, columns)

    monkeypatch.setattr("elfatt_sd.drawing.compare.side_by_side", keep)
    sheet = Sheet(lambda request: pipe, ["toy"], ["a cat", "a dog"], ["sd", "tome"], steps=2)
    sheet.run(lambda step, steps: None, lambda drawn: None)
    assert [row.ratios for row in sheet.lines[1].rows[1:]] == [pytest.approx((2.0, last))]
    said = list(sheet.summary())
    assert said[0].startswith(f"toy, tome: 2.00 (2.00 to {last:.2f}) times as fast, PSNR ")
    assert said[1:] == [f"toy: {BUSY}"] * told
    sheet.write(tmp_path)
    assert ["busy" in details for _, details in captions] == [False, told, False, told]
    assert ["busy" in title for title in titles] == [told]


BUSY = (
    "the machine was busy: equal runs took 2.00 to 6.00 s. Do not trust these speeds: close what else runs, and repeat"
)
