"""Figures say what they show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from elfatt_sd import errors as optional
from elfatt_sd.attention.ordering import Grid
from elfatt_sd.errors import ElfattError
from elfatt_sd.visualize import Grouping, Heads, Look, draw

GRID = Grid.image(4, 6)
EVEN = np.full(24, 1 / 24)
IMAGE = Image.new("RGB", (48, 32), (200, 30, 30))


def seen(**changes: Any) -> Look:
    blocks = np.arange(24) // 6
    own = np.where(blocks == 1, 0.125, 0.0)
    heads = (Heads((0,), None, EVEN, EVEN), Heads((1,), blocks, own, EVEN, text=0.25, exact_text=0.4))
    given: dict[str, Any] = {
        "method": "elfatt", "what": "agents and blocks", "layer": "down_blocks.0.attn1", "step": 2, "steps": 10,
        "grid": GRID, "query": 8, "heads": heads, "merged": Grouping("merge into one", np.arange(24) // 2),
        "agents": (Grouping("are averaged into one agent", np.arange(24) // 12),), "error": np.linspace(0, 0.5, 24),
        "relative_error": 0.29,
    }  # fmt: skip
    return Look(**{**given, **changes})


def texts(figure: Any) -> dict[str, str]:
    return {axes.get_title(): " ".join(axes.get_xlabel().split()) for axes in figure.axes}


def test_each_panel_says_what_it_shows() -> None:
    figure = draw(seen(), IMAGE)
    said = texts(figure)
    assert list(said) == [
        "image", "merged tokens", "agents", "shared keys, head 2", "exact attention", "the method, head 1",
        "the method, head 2", "error",
    ]  # fmt: skip
    assert "12 of 24 are left" in said["merged tokens"]
    assert "2 agents" in said["agents"]
    assert "4 different sets" in said["shared keys, head 2"]
    assert "darkest: 12.50% or more; 20% is from the text" in said["exact attention"]
    assert "it sees 6 of 24 tokens; darkest: 37.50% or more; 25% is from the text" in said["the method, head 2"]
    assert "29.0% of its norm" in said["error"]
    title = figure.get_suptitle()
    assert "elfatt, timestep 3 of 10: agents and blocks" in title and "layer down_blocks.0.attn1, 4 x 6 tokens" in title


def test_colours_follow_the_groups_and_what_is_not_seen_is_left_free() -> None:
    panels = {axes.get_title(): axes for axes in draw(seen(), IMAGE).axes}
    merged = panels["merged tokens"].images[-1].get_array().reshape(24, 4)
    assert len(np.unique(merged, axis=0)) == 12 and (merged[::2] == merged[1::2]).all()
    keys = panels["the method, head 2"].images[-1].get_array().reshape(24, 4)
    assert np.array_equal(keys[:, 3], seen().heads[1].seen)
    errors = panels["error"].images[-1].get_array().reshape(24, 4)
    assert (errors[:, 3] == 1).all(), "the image below would change the scale"


def test_only_what_is_there_is_drawn() -> None:
    assert list(texts(draw(seen(heads=(), merged=None, agents=())))) == ["error"]
    video = seen(grid=Grid(2, 2, 6), query=3)
    assert "frame 1 of 2" in draw(video).get_suptitle()


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(optional.PACKAGES, "matplotlib", optional.OptionalPackage("no_such", "plots", "eval"))
    with pytest.raises(ElfattError, match=r"pip install 'elfatt-sd\[eval\]'"):
        draw(seen())
