"""A bar on a terminal, and lines elsewhere: at each stage's start and now and then, with the time that is left."""

from __future__ import annotations

import pytest

from elfatt_sd import progress
from elfatt_sd.progress import Forecast, Lines, duration, progress_of


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that a test turns."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_line_for_each_stage_and_after_a_while(clock: list[float]) -> None:
    said: list[str] = []
    tell = Lines(said.append, "calls", every=30)
    for done in range(5):
        tell("first", done, 10)
        clock[0] += 20
    tell("second", 5, 10)
    assert said == [
        "first: 0 of 10 calls done",
        "first: 2 of 10 calls done, about 0:02:40 left",
        "first: 4 of 10 calls done, about 0:02:00 left",
        "second: 5 of 10 calls done, about 0:01:40 left",
    ]


def test_another_count_has_its_own_speed(clock: list[float]) -> None:
    said: list[str] = []
    tell = Lines(said.append, "images", every=0, at_once=False)
    tell("first", 3, 3)
    clock[0] += 1000
    tell("second", 10, 30)
    clock[0] += 10
    tell("second", 20, 30)
    tell("third", 5, 30)
    assert said[1:] == [
        "second: 10 of 30 images done",
        "second: 20 of 30 images done, about 0:00:10 left",
        "third: 5 of 30 images done",
    ]


def test_a_total_that_changes_has_its_own_speed(clock: list[float]) -> None:
    """Steps of a shorter run say nothing of those to come."""
    said: list[str] = []
    tell = Lines(said.append, "steps", every=0, at_once=False)
    for done, total, seconds in ((1, 24, 1), (2, 24, 1), (26, 300, 1), (27, 300, 10)):
        clock[0] += seconds
        tell("image", done, total)
    assert said[-2:] == ["image: 26 of 300 steps done", "image: 27 of 300 steps done, about 0:45:30 left"]


def test_nothing_is_said_of_what_is_quick(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress_of("steps", at_once=False) as tell:
        tell("image 1 of 1", 1, 2)
    with progress_of("steps", shown=False) as tell:
        clock[0] += 1000
        tell("image 1 of 1", 2, 2)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    with progress_of("steps") as tell:
        tell("image 1 of 3", 7, 90)
    assert "image 1 of 3" in (shown := capsys.readouterr().err) and "7/90 steps" in shown


def test_a_forecast_says_beforehand_how_much_is_done(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many calls, and how long they take once calls were timed; again where that has doubled."""
    moments = iter([1.0, 100.0, 103.0, 104.0, 124.0, 125.0])
    monkeypatch.setattr("elfatt_sd.progress.time.monotonic", lambda: next(moments))
    told: list[int] = []
    forecast = Forecast(lambda name, done, total: told.append(done))
    for done in range(6):
        forecast("256 pixels", done, 20)
    assert told == list(range(6))
    assert capfd.readouterr().err.splitlines() == [
        "20 calls in all",
        "about 60 seconds in all, if each takes as long as the latest",
        "about 7 minutes in all, if each takes as long as the latest",
    ]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.2, "0 seconds"), (119, "119 seconds"), (400, "7 minutes"), (7200, "2 hours"), (6e10, "694,444 days")],
)
def test_a_time_is_told_in_a_unit_that_suits_it(seconds: float, said: str) -> None:
    assert duration(seconds) == said
