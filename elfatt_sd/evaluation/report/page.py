"""Assemble the self-contained page."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elfatt_sd.evaluation.records import MadeImage
from elfatt_sd.evaluation.report.charts import METHODS, METHODS_DARK, Chart, Palette
from elfatt_sd.evaluation.report.data import NULL, PARTS, Results, Row, is_kernel
from elfatt_sd.evaluation.report.summary import comparison, findings, headline, recommended
from elfatt_sd.evaluation.report.tables import main_table, metrics_table, more_table, published_table, shown
from elfatt_sd.evaluation.run import RowFolder
from elfatt_sd.evaluation.statistics import FEWEST_CLASSES, TOO_FEW
from elfatt_sd.files import is_plain_name, read_plain

if TYPE_CHECKING:
    import jinja2


# Longest side of an image in pixels: the first with which the page is small enough; 0 leaves images out.
EDGES = (448, 256, 128, 64, 0)
_COLUMNS, _PAIRS = 6, 3  # latents in the grid, and most changed images of a row
_FRAMES = 24  # of a clip that are shown


@dataclass(frozen=True)
class Picture:
    """One image of one row; `uri` is empty where it cannot be shown, and `gap` says why."""

    row: Row
    index: int
    prompt: str
    uri: str
    gap: str


class Pictures:
    """The images of a run, read from `RUN/cells/CELL/images`, as the lists of its rows name them."""

    def __init__(self, results: Results) -> None:
        self.results = results
        # of the rows that start from the same latents: all but the null row
        self.made: dict[Row, list[MadeImage]] = {}
        self.folders = {row: RowFolder(results.folder / "cells" / row.cell) for row in results.rows}
        for row, folder in self.folders.items():
            if row.role != NULL and is_plain_name(row.cell) and folder.finished:  # a folder of this run alone
                self.made[row] = folder.made_images()

    def grid(self, edge: int) -> list[list[Picture]]:
        """Return the images of some latents, chosen evenly; unfinished rows are left aside."""
        images = min(map(len, self.made.values()), default=0)
        count = min(_COLUMNS, images)
        latents = [(2 * place + 1) * images // (2 * count) for place in range(count)]
        return [[self.picture(row, index, edge) for index in latents] for row in self.made]

    def most_changed(self, edge: int) -> list[tuple[Row, list[tuple[Picture, Picture]]]]:
        """Return for each method the pairs (untouched, method) that differ most."""
        base, found = self.results.baseline, []
        if base is None or base not in self.made:
            return []
        for row, made in self.made.items():
            shared = [index for index in row.most_changed if index < len(made)][:_PAIRS]
            if row is not base and shared:
                pairs = [(self.picture(base, index, edge), self.picture(row, index, edge)) for index in shared]
                found.append((row, pairs))
        return found

    def picture(self, row: Row, index: int, edge: int) -> Picture:
        made = self.made[row][index]
        clip = self.results.protocol.get("frames") or 1, self.results.protocol.get("frame_rate") or 16.0
        uri, gap = _data_uri(self.folders[row].image_file(index), made.sha256, edge, *clip)
        return Picture(row, index, made.prompt, uri, gap)


def _data_uri(path: Path, sha256: str, edge: int, frames: int, rate: float) -> tuple[str, str]:
    from PIL import Image

    try:
        content = read_plain(path)
    except OSError:
        return "", "no image"
    if hashlib.sha256(content).hexdigest() != sha256:
        return "", "altered after generation"
    picture = Image.open(io.BytesIO(content)).convert("RGB")
    height, every = picture.height // frames, -(-frames // _FRAMES)
    tops = range(0, picture.height, every * height)
    first, *rest = (picture.crop((0, top, picture.width, top + height)) for top in tops)
    for frame in (first, *rest):
        frame.thumbnail((edge, edge), Image.Resampling.LANCZOS)
    options: dict[str, Any] = {"quality": 84, "method": 4, "use_sharp_yuv": True}
    if frames > 1:
        options |= {"save_all": True, "append_images": rest, "duration": round(1000 * every / rate), "loop": 0}
    stream = io.BytesIO()
    first.save(stream, "WEBP", **options)
    return f"data:image/webp;base64,{base64.b64encode(stream.getvalue()).decode()}", ""


MAX_BYTES = 5 * 1000 * 1000
_HERE = Path(__file__).parent
STYLE = _HERE / "style.css"
_TYPES = {".csv": "text/csv", ".md": "text/markdown", ".tex": "application/x-tex"}


def render_page(results: Results, plots: Sequence[Chart], missing: Sequence[str], files: Mapping[str, str]) -> str:
    from markupsafe import Markup

    light, dark = (
        ";".join(f"--m{slot}:{colour}" for slot, colour in enumerate(colours)) for colours in (METHODS, METHODS_DARK)
    )
    palette = f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"  # and for print
    shared = {
        "markup": Markup,
        "style": Markup(palette + STYLE.read_text(encoding="utf-8")),
        "script": Markup((_HERE / "script.js").read_text(encoding="utf-8")),
        "results": results,
        "palette": Palette(results),
        "headline": headline(results),
        "recommended": recommended(results),
        "findings": findings(results),
        "main": main_table(results),
        "metrics": metrics_table(results),
        "more": more_table(results),
        "published": published_table(results),
        "comparable": comparison(results),
        "kernels": [name for name in results.distances if is_kernel(name)],
        "too_few": TOO_FEW,
        "fewest": FEWEST_CLASSES,
        "timed": PARTS[results.time_part],
        "facts": [*flatten(results.environment), *flatten({"reference": results.data.get("reference")})],
        "protocol": json.dumps(results.protocol, indent=2, ensure_ascii=False, default=str),
        "plots": plots,
        "missing": missing,
        "downloads": {
            name: f"data:{_TYPES[Path(name).suffix]};charset=utf-8;base64,{base64.b64encode(text.encode()).decode()}"
            for name, text in files.items()
        },
    }
    template, pictures, page = page_template(_HERE / "template.html.j2"), Pictures(results), ""
    for edge in EDGES:
        grid, changed = (pictures.grid(edge), pictures.most_changed(edge)) if edge else ([], [])
        page = shown(template.render(**shared, edge=edge, grid=grid, changed=changed))
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
