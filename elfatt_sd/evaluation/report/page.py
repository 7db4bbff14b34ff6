"""The report of a run: one self-contained page, the table as CSV and Markdown, and each plot as PNG.

`write_report` reads `RUN/results.json` and the images of the run. Each figure on the page stands in `results.json` or
in the published table; what is not there is shown as "not measured".
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elfatt_sd.errors import REPORT, ElfattError, need
from elfatt_sd.evaluation.report.charts import Chart, draw_plots, styles
from elfatt_sd.evaluation.report.data import NULL, PARTS, Results, Row, is_kernel
from elfatt_sd.evaluation.report.tables import (
    comparison,
    findings,
    headline,
    main_table,
    metrics_table,
    more_table,
    published_table,
    recommended,
    written_tables,
)
from elfatt_sd.evaluation.run import RowFolder
from elfatt_sd.evaluation.statistics import FEWEST_CLASSES, TOO_FEW
from elfatt_sd.files import is_plain_name, read_plain, write_file

if TYPE_CHECKING:
    import jinja2

PAGE = "index.html"
_FILES = (PAGE, "table.*", "*.png", "written.json")  # the last one of earlier versions
_EDGE = 256  # pixels of an image's longer side
_COLUMNS, _PAIRS = 6, 3  # latents in the grid, and most changed images of a row
_FRAMES = 24  # of a clip that are shown


def write_report(results: Results) -> Path:
    folder = results.folder / "report"
    replace_files(folder, report_files(results))
    return folder / PAGE


def report_files(results: Results, *, page: bool = True) -> dict[str, bytes]:
    """Return the whole report: page, tables and plots, by the names of their files."""
    need("a report", *REPORT)
    plots = draw_plots(results)
    texts = written_tables(results) | ({PAGE: render_page(results, plots)} if page else {})
    return {name: text.encode() for name, text in texts.items()} | {f"{plot.name}.png": png for plot, png in plots}


def replace_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write a report's files into a folder and remove those that a former report left there."""
    if folder.is_symlink():
        raise ElfattError(f"{folder} is a link; a report replaces and removes files, so it takes a folder of its own.")
    for name, content in contents.items():
        write_file(folder / name, content)
    for path in {path for pattern in _FILES for path in folder.glob(pattern)}:
        if path.name not in contents and (path.is_symlink() or path.is_file()):
            path.unlink()


@dataclass(frozen=True)
class Picture:
    """One image of one row; `uri` is empty where it is not there any more."""

    row: Row
    index: int
    prompt: str
    uri: str


Changed = list[tuple[Row, list[tuple[Picture, Picture]]]]  # of a method: untouched, and its own


def pictures_of(results: Results) -> tuple[list[list[Picture]], Changed]:
    """Return the images of some latents, chosen evenly, and of each method the pairs that differ most.

    They are of all finished rows that start from the same latents: all but the null row.
    """
    clip = results.protocol.get("frames") or 1, results.protocol.get("frame_rate") or 16.0
    rows = [row for row in results.rows if row.role != NULL and is_plain_name(row.cell)]  # folders of this run alone
    folders = {row: RowFolder(results.folder / "cells" / row.cell) for row in rows}
    made = {row: folder.made_images() for row, folder in folders.items() if folder.finished}

    def picture(row: Row, index: int) -> Picture:
        try:
            uri = _webp(read_plain(folders[row].image_file(index)), *clip)
        except OSError:  # deleted or damaged
            uri = ""
        return Picture(row, index, made[row][index].prompt, uri)

    images = min(map(len, made.values()), default=0)
    count = min(_COLUMNS, images)
    latents = [(2 * place + 1) * images // (2 * count) for place in range(count)]
    base, changed = results.baseline, Changed()
    for row in made:
        shared = [index for index in row.most_changed if index < len(made[row])][:_PAIRS]
        if base in made and row is not base and shared:
            changed.append((row, [(picture(base, index), picture(row, index)) for index in shared]))
    return [[picture(row, index) for index in latents] for row in made], changed


def _uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _webp(content: bytes, frames: int, rate: float) -> str:
    from PIL import Image

    picture = Image.open(io.BytesIO(content)).convert("RGB")
    height, every = picture.height // frames, -(-frames // _FRAMES)
    tops = range(0, picture.height, every * height)
    first, *rest = (picture.crop((0, top, picture.width, top + height)) for top in tops)
    for frame in (first, *rest):
        frame.thumbnail((_EDGE, _EDGE), Image.Resampling.LANCZOS)
    options: dict[str, Any] = {"quality": 84, "method": 4, "use_sharp_yuv": True}
    if frames > 1:
        options |= {"save_all": True, "append_images": rest, "duration": round(1000 * every / rate), "loop": 0}
    stream = io.BytesIO()
    first.save(stream, "WEBP", **options)
    return _uri("image/webp", stream.getvalue())


_HERE = Path(__file__).parent
STYLE = _HERE / "style.css"


def render_page(results: Results, plots: Sequence[tuple[Chart, bytes]]) -> str:
    from markupsafe import Markup

    grid, changed = pictures_of(results)
    shared = {
        "style": Markup(STYLE.read_text(encoding="utf-8")),
        "script": Markup((_HERE / "script.js").read_text(encoding="utf-8")),
        "results": results,
        "styles": styles(results),
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
        "edge": _EDGE,
        "grid": grid,
        "changed": changed,
        "plots": [(plot, _uri("image/png", png)) for plot, png in plots],
    }
    return page_template(_HERE / "template.html.j2").render(**shared)


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
