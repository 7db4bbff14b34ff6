"""The report of a run: one self-contained page, the table as CSV and Markdown, and each plot as PNG.

`write_report` reads `RUN/results.json` and the images of the run. Each figure on the page stands in `results.json` or
in the published table; what is not there is shown as "not measured".
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from elfatt_sd.config import PRESETS
from elfatt_sd.drawing.compare import BRIGHTER, Pair, difference
from elfatt_sd.errors import PACKAGES, REPORT, ElfattError, need
from elfatt_sd.evaluation.report import tables
from elfatt_sd.evaluation.report.charts import Chart, draw_plots, styles
from elfatt_sd.evaluation.report.data import NULL, PARTS, Results, Row, is_kernel
from elfatt_sd.evaluation.run import RowFolder
from elfatt_sd.evaluation.statistics import FEWEST_CLASSES, TOO_FEW
from elfatt_sd.files import is_plain_name, read_plain, write_file

if TYPE_CHECKING:
    import jinja2

PAGE = "index.html"
_FILES = (PAGE, "table.*", "*.png")
_OF_ONE = ("prompt", "seed", "seconds", "untouched_seconds", "speed_ratio", "speed_ratios", "psnr_db", "identical")
_EDGE, SIDE = 256, 512  # pixels of an image's longer side, among many and in a pair
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
    texts = tables.written_tables(results) | ({PAGE: render_page(results, plots)} if page else {})
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
    change: str  # its difference to the untouched image; empty where one of them is missing, or it is that one


Changed = list[tuple[Row, list[tuple[Picture, Picture]]]]  # of a method: untouched, and its own


def pictures_of(results: Results) -> tuple[list[list[Picture]], Changed]:
    """Return the images of some latents, chosen evenly, and of each method the pairs that differ most.

    They are of all finished rows that start from the same latents: all but the null row.
    """
    clip = results.protocol.get("frames") or 1, results.protocol.get("frame_rate") or 16.0
    rows = [row for row in results.rows if row.role != NULL and is_plain_name(row.cell)]  # folders of this run alone
    folders = {row: RowFolder(results.folder / "cells" / row.cell) for row in rows}
    made = {row: folder.made_images() for row, folder in folders.items() if folder.finished}

    def opened(row: Row, index: int) -> Image.Image | None:
        with contextlib.suppress(OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # deleted or damaged
            return Image.open(io.BytesIO(read_plain(folders[row].image_file(index)))).convert("RGB")
        return None

    def picture(row: Row, index: int) -> Picture:
        shown, untouched = opened(row, index), opened(base, index) if base in made and row is not base else None
        change = _webp(difference(untouched, shown), *clip) if shown and untouched else ""
        return Picture(row, index, made[row][index].prompt, _webp(shown, *clip) if shown else "", change)

    images = min(map(len, made.values()), default=0)
    count = min(_COLUMNS, images)
    latents = [(2 * place + 1) * images // (2 * count) for place in range(count)]
    base, changed = results.baseline, Changed()
    for row in made:
        shared = [index for index in row.most_changed if index < len(made[row])][:_PAIRS]
        if base in made and row is not base and shared:
            changed.append((row, [(picture(base, index), picture(row, index)) for index in shared]))
    return [[picture(row, index) for index in latents] for row in made], changed


def data_uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _webp(picture: Image.Image, frames: int, rate: float) -> str:
    height, every = picture.height // frames, -(-frames // _FRAMES)
    shown = [picture.crop((0, top, picture.width, top + height)) for top in range(0, picture.height, every * height)]
    return webp(shown, _EDGE, duration=round(1000 * every / rate), loop=0)


def webp(frames: Sequence[Image.Image], edge: int, **clip: Any) -> str:
    """Return an image, or the frames of a clip, for a page; the longer side has at most so many pixels."""
    stream, (first, *rest) = io.BytesIO(), [frame.copy() for frame in frames]
    for frame in (first, *rest):
        frame.thumbnail((edge, edge), Image.Resampling.LANCZOS)
    options: dict[str, Any] = {"save_all": True, "append_images": rest, **clip} if rest else {}
    first.save(stream, "WEBP", quality=90, method=4, use_sharp_yuv=True, **options)
    return data_uri("image/webp", stream.getvalue())


_HERE = Path(__file__).parent


def render_page(results: Results, plots: Sequence[tuple[Chart, bytes]]) -> str:
    grid, changed = pictures_of(results)
    metrics = tables.metrics_table(results)
    return page_template(_HERE / "template.html.j2").render(
        results=results,
        styles=styles(results),
        headline=tables.headline(results),
        recommended=tables.recommended(results),
        findings=tables.findings(results),
        main=tables.told_apart(tables.main_table(results)),
        metrics=metrics and tables.told_apart(metrics),
        more=tables.told_apart(tables.more_table(results)),
        published=tables.published_table(results),
        comparable=tables.comparison(results),
        kernels=[name for name in results.distances if is_kernel(name)],
        too_few=TOO_FEW,
        fewest=FEWEST_CLASSES,
        timed=PARTS[results.time_part],
        facts=[*flatten(results.environment), *flatten({"reference": results.data.get("reference")})],
        protocol=json.dumps(results.protocol, indent=2, ensure_ascii=False, default=str),
        edge=_EDGE,
        brighter=BRIGHTER,
        grid=grid,
        changed=changed,
        plots=[(plot, data_uri("image/png", png)) for plot, png in plots],
    )


def write_pairs(image: Path, pairs: Sequence[Pair], lines: Sequence[str] = ()) -> str | None:
    """Write a page with a slider for each pair, next to the image of them; None where there are none, or no Jinja."""
    if not pairs or PACKAGES["jinja2"].missing:
        return None
    record, labels = json.loads(read_plain(image.with_suffix(".json"))), {pair.label for pair in pairs}
    first, *others = record.get("trials", [record])
    own = {"methods", "config", *(_OF_ONE if len(labels) > 1 else ())}
    facts = {name: value for name, value in first.items() if all(value == other.get(name) for other in others)}
    said = {", ".join(filter(None, row.caption(pair.busy))) for pair in pairs for row in (pair.untouched, pair.own)}
    pictures = [(pair.untouched.picture, pair.own.picture) for pair in pairs]
    parts = [[webp([each], SIDE) for each in (*both, difference(*both))] for both in pictures]
    drawn = [each for trial in (first, *others) for each in trial.get("methods", [trial])]
    shown = {pair.own.method for pair in pairs}
    configs = {each["method"]: each["config"] for each in drawn if each["method"] in shown}
    known = [name for name in PRESETS if PRESETS[name].to_dict() == configs.get(name)]
    text = page_template(_HERE / "pairs.html.j2").render(
        title=labels.pop() if len(labels) == 1 else f"{len(labels)} images",
        findings=[line for line in lines if line not in said],
        files=configs,
        data_uri=data_uri,
        known=known,
        run=facts,
        shown=[(pair, *three) for pair, three in zip(pairs, parts, strict=True)],
        brighter=BRIGHTER,
        facts=flatten({name: value for name, value in facts.items() if name not in own}),
    )
    write_file(image.with_suffix(".html"), text.encode(errors="backslashreplace"))
    return str(image.with_suffix(".html"))


def page_template(path: Path) -> jinja2.Template:
    """Return the template of a page, with what pages share: all that is put into it is escaped, and must be given."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([path.parent, _HERE]), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    for name in ("style.css", "script.js"):
        environment.globals[Path(name).stem] = Markup((_HERE / name).read_text(encoding="utf-8"))
    return environment.get_template(path.name)


def flatten(data: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Write nested mappings as a flat list of names and texts."""
    facts: list[tuple[str, str]] = []
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            facts += flatten(value, f"{name} · ")
        else:
            value = float(f"{value:.6g}") if isinstance(value, float) else value
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            facts.append((name, text))
    return facts
