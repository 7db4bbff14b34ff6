"""The plots: each is drawn once and kept as PNG, for papers, and as SVG that takes the colours of the page."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elfatt_sd.evaluation.report import charts
from elfatt_sd.evaluation.report.data import PARTS, Results
from elfatt_sd.evaluation.report.palette import INK, PAPER, RULE, Palette
from elfatt_sd.evaluation.report.scatter import (
    accuracy_over_time,
    closeness_over_time,
    distance_over_memory,
    distance_over_time,
)
from elfatt_sd.optional import need

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE: Any = {
    "font.size": 9,
    "font.family": "sans-serif",
    "text.parse_math": False,  # labels are text, whatever they contain
    "svg.fonttype": "none",
    "svg.hashsalt": "elfatt-sd",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.5,
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
    "savefig.facecolor": PAPER,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.4,
    "lines.markersize": 5.5,
}


@dataclass(frozen=True)
class Plot:
    """A finished plot."""

    name: str  # the file name without its ending
    title: str  # what it shows
    caption: str  # how to read it
    alt: str  # its content in words and figures
    svg: str  # inline SVG, without references to anything outside
    png: bytes  # the same as a PNG file


def draw_plots(results: Results, palette: Palette) -> tuple[list[Plot], list[str]]:
    """Draw every plot for which the run has figures."""
    plots: list[Plot] = []
    missing: list[str] = []
    with drawing():
        for make in _makers(results):
            chart = make(results, palette)
            if isinstance(chart, str):
                missing.append(chart)
            else:
                plots.append(_finish(chart, palette))
    return plots, missing


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Draw in the style of the report."""
    need("a plot", "matplotlib")
    import matplotlib

    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")  # the page's own fonts may have it
        yield


def to_png(figure: Figure) -> bytes:
    """Write a figure as a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=200, metadata={"Software": None})
    return file.getvalue()


def _makers(results: Results) -> Iterator[Callable[[Results, Palette], charts.Chart | str]]:
    yield charts.differences
    for part in PARTS:
        yield functools.partial(distance_over_time, part=part)
    yield distance_over_memory
    if "mean" in results.attributes:
        yield accuracy_over_time
    yield charts.closeness
    yield closeness_over_time
    yield charts.memory_regression
    for part in PARTS:
        yield functools.partial(charts.timing_strip, part=part)


def _finish(chart: charts.Chart, palette: Palette) -> Plot:
    svg = io.StringIO()
    chart.figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    alt = f"{chart.title}. {'; '.join(chart.points)}."
    inline = _inline(svg.getvalue(), chart.name, palette)
    return Plot(chart.name, chart.title, chart.caption, alt, inline, to_png(chart.figure))


def _inline(svg: str, name: str, palette: Palette) -> str:
    """Make a standalone SVG fit for a page: no prolog, ids of its own, colours from the page's variables."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<(metadata|style)\b.*?</\1>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(xmlns(:xlink)?|version)="[^"]*"', "", svg, count=3).replace("xlink:href=", "href=")
    svg = re.sub(r'(\bid="|href="#|url\(#)', lambda match: f"{match[1]}{name}-", svg)
    for colour, variable in palette.variables().items():
        svg = re.sub(f"(?<=: ){re.escape(colour)}\\b", f"var({variable})", svg)
    svg = re.sub(r"font: ([^;\"]*?)'[^\"]*?sans-serif", r"font: \1sans-serif", svg)
    width, height = (float(side) for side in re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups())  # type: ignore[union-attr]
    svg = re.sub(r"^<svg [^>]*>", f'<svg viewBox="0 0 {width:g} {height:g}" aria-hidden="true" focusable="false">', svg)
    return re.sub(r">\s+<", "><", svg)
