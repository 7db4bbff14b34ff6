"""Assemble the self-contained page."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elfatt_sd.evaluation.intervals import FEWEST_CLASSES, TOO_FEW
from elfatt_sd.evaluation.report.data import PARTS, Results
from elfatt_sd.evaluation.report.metrics import metrics_table
from elfatt_sd.evaluation.report.palette import METHODS, METHODS_DARK, Palette
from elfatt_sd.evaluation.report.pictures import DETAILS, Detail, Pictures
from elfatt_sd.evaluation.report.plots import Plot
from elfatt_sd.evaluation.report.published import comparability, comparable_words, published_source
from elfatt_sd.evaluation.report.rows import is_kernel
from elfatt_sd.evaluation.report.summary import findings, headline, recommended
from elfatt_sd.evaluation.report.tables import main_table, more_table, published_table
from elfatt_sd.evaluation.report.text import shown

if TYPE_CHECKING:
    import jinja2

MAX_BYTES = 5 * 1000 * 1000
_HERE = Path(__file__).parent
STYLE = _HERE / "style.css"
_TYPES = {".csv": "text/csv", ".md": "text/markdown", ".tex": "application/x-tex"}


def render_page(
    results: Results, pictures: Pictures, plots: Sequence[Plot], missing: Sequence[str], files: Mapping[str, str]
) -> str:
    """Write the page with as much of the images as fits into `MAX_BYTES`."""
    from markupsafe import Markup

    template = page_template(_HERE / "template.html.j2")
    shared = {
        "markup": Markup,
        "style": Markup(_colours() + STYLE.read_text(encoding="utf-8")),
        "script": Markup((_HERE / "script.js").read_text(encoding="utf-8")),
        **_told(results),
        "plots": plots,
        "missing": missing,
        "downloads": {name: _download(name, text) for name, text in files.items()},
    }
    page = ""
    for detail in DETAILS:
        page = shown(template.render(**shared, **_pictures(pictures, detail)))
        if len(page.encode("utf-8")) <= MAX_BYTES:
            break
    return page


def page_template(path: Path) -> jinja2.Template:
    """Return the template of a page: all that is put into it is escaped, and all that it names must be given."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(path.parent), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template(path.name)


def _told(results: Results) -> dict[str, Any]:
    return {
        "results": results,
        "palette": Palette(results),
        "headline": headline(results),
        "recommended": recommended(results),
        "findings": findings(results),
        "main": main_table(results),
        "metrics": metrics_table(results),
        "more": more_table(results),
        "published": published_table(results),
        "source": published_source(results),
        "comparability": comparability(results),
        "comparable": comparable_words(results),
        "kernels": [name for name in results.distances if is_kernel(name)],
        "too_few": TOO_FEW,
        "fewest": FEWEST_CLASSES,
        "timed": PARTS[results.time_part],
        "facts": [*flatten(results.environment), *flatten({"reference": results.data.get("reference")})],
        "protocol": json.dumps(results.protocol, indent=2, ensure_ascii=False, default=str),
    }


def _pictures(pictures: Pictures, detail: Detail) -> dict[str, Any]:
    grid = pictures.grid(detail)
    return {"detail": detail, "grid": [line for line in grid if line], "changed": pictures.most_changed(detail)}


def _download(name: str, text: str) -> str:
    content = base64.b64encode(text.encode("utf-8")).decode("ascii")
    return f"data:{_TYPES[Path(name).suffix]};charset=utf-8;base64,{content}"


def _colours() -> str:
    """Define the methods' colours for light paper, dark screens and print."""
    light = ";".join(f"--m{slot}:{colour}" for slot, colour in enumerate(METHODS))
    dark = ";".join(f"--m{slot}:{colour}" for slot, colour in enumerate(METHODS_DARK))
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"


def flatten(data: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Write nested mappings as a flat list of names and texts."""
    facts: list[tuple[str, str]] = []
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            facts += flatten(value, f"{name} · ")
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            facts.append((name, text))
    return facts
