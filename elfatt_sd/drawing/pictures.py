"""A labelled image of several results, and how far two images are apart."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

Pixels = npt.NDArray[np.floating[Any]]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
INK, FAINT, PAPER = (24, 24, 27), (96, 96, 104), (255, 255, 255)
MARGIN = 16  # pixels around everything
TITLE_LINES = 2  # of a long prompt; its whole text is in the file's settings


def side_by_side(
    pictures: Sequence[Image.Image], captions: Sequence[tuple[str, str]], title: str = "", columns: int | None = None
) -> Image.Image:
    """Put images in rows, each above its caption, pixel for pixel."""
    size = max(13, min(picture.width for picture in pictures) // 19)
    title_font, small = ImageFont.load_default(size * 1.1), ImageFont.load_default(size * 0.95)
    columns = min(columns or len(pictures), len(pictures))
    cell_width, cell_height = (max(side) for side in zip(*(picture.size for picture in pictures), strict=True))
    width = columns * (cell_width + MARGIN) + MARGIN
    letters = round((width - 2 * MARGIN) / title_font.getlength("n"))
    lines = textwrap.wrap(title, letters, max_lines=TITLE_LINES, placeholder=" …")
    top = MARGIN + (len(lines) * round(size * 1.5) + MARGIN // 2 if lines else 0)
    row_height = cell_height + MARGIN + round(size * 3.0)
    sheet = Image.new("RGB", (width, top + -(-len(pictures) // columns) * row_height), PAPER)
    draw = ImageDraw.Draw(sheet)
    for number, line in enumerate(lines):
        fitted = _shorten(line, title_font, width - 2 * MARGIN)
        draw.text((MARGIN, MARGIN + number * round(size * 1.5)), fitted, INK, title_font)
    for number, (picture, (name, details)) in enumerate(zip(pictures, captions, strict=True)):
        row, column = divmod(number, columns)
        left, above = MARGIN + column * (cell_width + MARGIN), top + row * row_height
        below = above + picture.height + MARGIN // 2
        sheet.paste(picture.convert("RGB"), (left, above))
        draw.text((left, below), _shorten(name, title_font, cell_width), INK, title_font)
        draw.text((left, below + round(size * 1.55)), _shorten(details, small, cell_width), FAINT, small)
    return sheet


def psnr(first: Image.Image, second: Image.Image) -> float:
    """Return the peak signal-to-noise ratio of two images of one size in dB, `10 log10(255^2 / mean squared error)`."""
    one, two = (np.asarray(picture.convert("RGB"), dtype=np.float64) for picture in (first, second))
    error = float(np.mean((one - two) ** 2))
    return float("inf") if error == 0 else float(10 * np.log10(255**2 / error))


def fault_of(pixels: Pixels, flagged: bool = False) -> str:
    """Return what is wrong with an image that no working pipeline makes, as the end of a sentence; empty otherwise."""
    if not np.isfinite(pixels).all():
        return "is not finite (NaN or infinity): give dtype float32 or bfloat16"
    low, high = (each(pixels.reshape(-1, 3).round(), axis=0) for each in (np.min, np.max))
    if (low < high).any():
        return ""
    cause = "the safety checker" if flagged else "an overflow (give dtype float32 or bfloat16), or a safety checker"
    return f"is {'of one colour' if high.any() else 'black'}: {cause}"


def _shorten(text: str, font: Font, width: int) -> str:
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"
