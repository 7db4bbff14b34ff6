"""One colour and one marker for each method, the same in every plot and table and safe for colour-blind readers.

The hues are those of Okabe and Ito (2008), darkened for white and lightened for dark paper where a thin line would else
fall below a contrast of 3 to 1. Markers repeat the distinction without colour.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from elfatt_sd.evaluation.report.data import Results
from elfatt_sd.evaluation.report.rows import BASELINE, NULL, Row
from elfatt_sd.presets import COLOURED

INK, RULE, PAPER = "#1c2024", "#dcdfe3", "#ffffff"
BASE, SHADOW = "#6a7077", "#8d939a"
METHODS = ("#0072b2", "#d55e00", "#008a63", "#a8468f", "#9a6a00", "#2b8cc4", "#7a4fd0", "#b03a48")
METHODS_DARK = ("#4aa8e0", "#ff8b45", "#2fc096", "#d987c3", "#e0ae3d", "#8fd0f5", "#b39bf2", "#f0919c")
_MARKERS = (("o", "●"), ("s", "■"), ("^", "▲"), ("D", "◆"), ("v", "▼"), ("P", "✚"), ("X", "✖"), ("p", "⬟"))
_FIXED = {name: slot for slot, name in enumerate(COLOURED)}


@dataclass(frozen=True)
class Style:
    """How a method looks: colour on white paper, the page's variable for it, marker in plots and in text."""

    colour: str
    variable: str
    marker: str
    glyph: str


class Palette:
    """The styles of a run's methods: known methods always have the same, others take what is free.

    Past the number of colours, a colour comes again with another marker.
    """

    def __init__(self, results: Results) -> None:
        self._slots: dict[str, int] = {}
        free = (slot for slot in itertools.count() if slot not in self._wanted(results))
        for row in results.methods:
            if row.label not in self._slots:
                slot = _FIXED.get(row.method)
                self._slots[row.label] = next(free) if slot is None or slot in self._slots.values() else slot

    @staticmethod
    def _wanted(results: Results) -> set[int]:
        return {_FIXED[row.method] for row in results.methods if row.method in _FIXED}

    def style(self, row: Row) -> Style:
        if row.role == BASELINE:
            return Style(BASE, "--base", "o", "○")
        if row.role == NULL:
            return Style(SHADOW, "--shadow", "d", "◇")
        turn, slot = divmod(self._slots[row.label], len(METHODS))
        return Style(METHODS[slot], f"--m{slot}", *_MARKERS[(slot + turn) % len(_MARKERS)])

    @staticmethod
    def variables() -> dict[str, str]:
        """Map the colours of a plot to the page's variables."""
        named = {INK: "--ink", RULE: "--rule", PAPER: "--paper", BASE: "--base", SHADOW: "--shadow"}
        return named | {colour: f"--m{slot}" for slot, colour in enumerate(METHODS)}
