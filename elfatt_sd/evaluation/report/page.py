"""Assemble the self-contained page."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elfatt_sd.evaluation.records import MadeImage
from elfatt_sd.evaluation.report.charts import METHODS, METHODS_DARK, Palette, Plot
from elfatt_sd.evaluation.report.data import (
    NULL,
    PARTS,
    Results,
    Row,
    comparability,
    comparable_words,
    is_kernel,
    published_source,
)
from elfatt_sd.evaluation.report.summary import findings, headline, recommended
from elfatt_sd.evaluation.report.tables import main_table, metrics_table, more_table, published_table, shown
from elfatt_sd.evaluation.run import RowFolder
from elfatt_sd.evaluation.statistics import FEWEST_CLASSES, TOO_FEW
from elfatt_sd.files import is_plain_name, read_plain

if TYPE_CHECKING:
    import jinja2


@dataclass(frozen=True)
class Detail:
    """How much of the images a page shows."""

    edge: int  # longest side in pixels; smaller images keep their size
    quality: int  # of the WebP file, from 0 to 100
    columns: int  # number of latents in the grid
    pairs: int  # number of most changed images per row


_SHOWN = 24  # frames of a clip
DETAILS = (
    Detail(448, 84, 6, 3),
    Detail(384, 80, 6, 3),
    Detail(320, 78, 6, 3),
    Detail(256, 75, 6, 3),
    Detail(256, 72, 5, 2),
    Detail(192, 70, 4, 2),
    Detail(128, 65, 4, 1),
    Detail(96, 60, 3, 1),
    Detail(64, 50, 2, 0),
    Detail(64, 50, 0, 0),
)


@dataclass(frozen=True)
class Picture:
    """One image of one row; `uri` is None where it cannot be shown, and `gap` says why."""

    row: Row
    index: int
    prompt: str
    uri: str | None
    gap: str = ""


@dataclass
class Pictures:
    """The images of a run, read from `RUN/cells/CELL/images`, as the lists of its rows name them."""

    results: Results  # of the run
    _encoded: dict[tuple[str, int, int, int], Picture] = field(default_factory=dict)
    _made: dict[str, dict[int, MadeImage]] = field(default_factory=dict)

    @cached_property
    def rows(self) -> list[Row]:
        """The rows that start from the same latents and have images: all but the null row."""
        return [row for row in self.results.rows if row.role != NULL and self._listed(row)]

    @cached_property
    def prompts(self) -> dict[int, str]:
        """The prompt of each index."""
        return {index: made.prompt for row in reversed(self.rows) for index, made in self._listed(row).items()}

    def latents(self, count: int) -> list[int]:
        """Choose indices evenly from those that most rows have, unfinished rows left aside."""
        finished = [row for row in self.rows if not row.failed] or self.rows
        held = [set(self._listed(row)) for row in finished]
        if not held or count < 1:
            return []
        votes = {index: sum(index in have for have in held) for index in set().union(*held)}
        shared = sorted(index for index, number in votes.items() if number == max(votes.values()))
        count = min(count, len(shared))
        return [shared[(2 * place + 1) * len(shared) // (2 * count)] for place in range(count)]

    def grid(self, detail: Detail) -> list[list[Picture]]:
        return [[self._picture(row, index, detail) for index in self.latents(detail.columns)] for row in self.rows]

    def most_changed(self, detail: Detail) -> list[tuple[Row, list[tuple[Picture, Picture]]]]:
        """Return for each method the pairs (untouched, method) that differ most."""
        base = self.results.baseline
        if base is None or base not in self.rows:
            return []
        found = []
        for row in self.rows:
            shared = [index for index in row.most_changed if index in self._listed(row)][: detail.pairs]
            pairs = [(self._picture(base, index, detail), self._picture(row, index, detail)) for index in shared]
            if row is not base and pairs:
                found.append((row, pairs))
        return found

    def _picture(self, row: Row, index: int, detail: Detail) -> Picture:
        key = (row.cell, index, detail.edge, detail.quality)
        if key not in self._encoded:
            made = self._listed(row).get(index)
            path = self._folder(row).image_file(index)
            clip = self.results.protocol.get("frames") or 1, self.results.protocol.get("frame_rate") or 16.0
            uri, gap = _data_uri(path, made.sha256, detail, *clip) if made else (None, "no image")
            self._encoded[key] = Picture(row, index, self.prompts[index], uri, gap)
        return self._encoded[key]

    def _folder(self, row: Row) -> RowFolder:
        return RowFolder(self.results.folder / "cells" / row.cell)

    def _listed(self, row: Row) -> dict[int, MadeImage]:
        """The row's images by their indices."""
        if row.cell not in self._made:
            known = self._folder(row).known_images() if is_plain_name(row.cell) else []  # a folder of this run alone
            self._made[row.cell] = {made.index: made for made in known}
        return self._made[row.cell]


def _data_uri(path: Path, sha256: str, detail: Detail, frames: int, rate: float) -> tuple[str | None, str]:
    from PIL import Image

    try:
        content = read_plain(path)
        if hashlib.sha256(content).hexdigest() != sha256:
            return None, "altered after generation"
        with Image.open(io.BytesIO(content)) as source:
            picture = source.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None, "no image"
    if picture.height % frames:
        return None, f"no {frames} frames"
    height, every = picture.height // frames, -(-frames // _SHOWN)
    shown = [
        picture.crop((0, place * height, picture.width, (place + 1) * height)) for place in range(0, frames, every)
    ]
    for frame in shown:
        frame.thumbnail((detail.edge, detail.edge), Image.Resampling.LANCZOS)
    options: dict[str, Any] = {"quality": detail.quality, "method": 4, "use_sharp_yuv": True}
    if frames > 1:
        options |= {"save_all": True, "append_images": shown[1:], "duration": round(1000 * every / rate), "loop": 0}
    stream = io.BytesIO()
    shown[0].save(stream, "WEBP", **options)
    return f"data:image/webp;base64,{_base64(stream.getvalue())}", ""


MAX_BYTES = 5 * 1000 * 1000
_HERE = Path(__file__).parent
STYLE = _HERE / "style.css"
_TYPES = {".csv": "text/csv", ".md": "text/markdown", ".tex": "application/x-tex"}


def render_page(
    results: Results, pictures: Pictures, plots: Sequence[Plot], missing: Sequence[str], files: Mapping[str, str]
) -> str:
    """Write the page with as much of the images as fits into `MAX_BYTES`."""
    from markupsafe import Markup

    light, dark = (
        ";".join(f"--m{slot}:{colour}" for slot, colour in enumerate(colours)) for colours in (METHODS, METHODS_DARK)
    )
    palette = f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"  # and for print
    template = page_template(_HERE / "template.html.j2")
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
        "source": published_source(results),
        "comparability": comparability(results),
        "comparable": comparable_words(results),
        "kernels": [name for name in results.distances if is_kernel(name)],
        "too_few": TOO_FEW,
        "fewest": FEWEST_CLASSES,
        "timed": PARTS[results.time_part],
        "facts": [*flatten(results.environment), *flatten({"reference": results.data.get("reference")})],
        "protocol": json.dumps(results.protocol, indent=2, ensure_ascii=False, default=str),
        "plots": plots,
        "missing": missing,
        "downloads": {
            name: f"data:{_TYPES[Path(name).suffix]};charset=utf-8;base64,{_base64(text.encode())}"
            for name, text in files.items()
        },
    }
    page = ""
    for detail in DETAILS:
        grid = [line for line in pictures.grid(detail) if line]
        changed = pictures.most_changed(detail)
        page = shown(template.render(**shared, detail=detail, grid=grid, changed=changed))
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


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


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
