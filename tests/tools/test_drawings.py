"""The drawings of the page on the method say what the presets are."""

from __future__ import annotations

from pathlib import Path

from elfatt_sd.config import METHODS
from elfatt_sd.evaluation.report.charts import drawing
from tools.drawings import draw_phases, main


def test_every_method_has_its_phases() -> None:
    with drawing():
        axes = draw_phases().axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [name for name in METHODS if name != "sd"]
    said = [text.get_text() for text in axes.texts]
    assert said[0] == "merged" and "exact" in said and said[-1] == "sampled keys, 1 step of 4 exact"


def test_the_files_are_written(tmp_path: Path) -> None:
    main([str(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["layer.png", "phases.png"]
