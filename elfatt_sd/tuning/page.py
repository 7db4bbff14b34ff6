"""The page of a tuning: what was found, the curve, the map, images side by side; one file, and its plots as PNG."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from elfatt_sd.evaluation.report.page import STYLE, flatten, page_template
from elfatt_sd.evaluation.report.plots import drawing, to_png
from elfatt_sd.files import write_file
from elfatt_sd.optional import need
from elfatt_sd.pictures import side_by_side
from elfatt_sd.tuning import charts

if TYPE_CHECKING:
    from elfatt_sd.tuning.tuned import Tuned

_SIDE = 512  # pixels of an image on the page


def write_page(tuned: Tuned, folder: Path) -> Path:
    """Write `index.html` and the plots, and return the page's path."""
    need("the page of a tuning", "jinja2", "matplotlib")
    from markupsafe import Markup

    with drawing():
        plots = {"curve": to_png(charts.curve(tuned))}
        if tuned.config.per_layer:
            plots["choices"] = to_png(charts.choices(tuned))
    if tuned.proof is not None:
        plots["images"] = _png(_sheet(tuned))
    page = page_template(Path(__file__).with_name("page.html.j2")).render(
        tuned=tuned,
        lines=tuned.lines(),
        plots={name: _uri(data) for name, data in plots.items()},
        pairs=_pairs(tuned),
        layers=charts.describe(tuned.config),
        facts=flatten(tuned.record),
        style=Markup(STYLE.read_text(encoding="utf-8")),
    )
    files = {f"{name}.png": data for name, data in plots.items()} | {"index.html": page.encode("utf-8")}
    for name, data in files.items():
        write_file(folder / name, data)
    return folder / "index.html"


def _pairs(tuned: Tuned) -> list[dict[str, Any]]:
    proof = tuned.proof
    if proof is None:
        return []
    return [
        {
            "prompt": proof.samples[number].prompt,
            "seed": proof.samples[number].seed,
            "closeness": tuned.measure.words(proof.point.closeness[number]),
            "untouched": _uri(_small(proof.untouched[number].frames[0])),
            "tuned": _uri(_small(proof.tuned[number].frames[0])),
        }
        for number in _farthest_first(tuned)
    ]


def _farthest_first(tuned: Tuned) -> list[int]:
    assert tuned.proof is not None
    close = tuned.proof.point.closeness
    return sorted(range(len(close)), key=close.__getitem__, reverse=not tuned.measure.higher)


def _sheet(tuned: Tuned) -> Image.Image:
    proof = tuned.proof
    assert proof is not None
    order = _farthest_first(tuned)
    pictures, captions = [], []
    for what, number in {"worst": order[0], "median": order[len(order) // 2]}.items():
        close = tuned.measure.words(proof.point.closeness[number])
        pictures += [proof.untouched[number].frames[0], proof.tuned[number].frames[0]]
        captions += [("untouched", proof.samples[number].prompt), (f"tuned, {what}", close)]
    return side_by_side(pictures, captions, columns=2)


def _small(image: Image.Image) -> bytes:
    shown = image.copy()
    shown.thumbnail((_SIDE, _SIDE))
    return _png(shown)


def _png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def _uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode('ascii')}"
