"""Decode images to 8-bit RGB, or refuse what cannot be read rightly."""

from __future__ import annotations

import io
import warnings
from typing import IO, Any

DECODING = 4  # goes up when the same file gives other pixels, or none
_SCAN, _END = b"\xda", b"\xff\xd9"  # of JPEG: the mark that data follow, and that of the end
_DRAWINGS = ("EPS", "WMF")  # another program would draw them


def is_image(file: IO[bytes]) -> bool:
    """Tell whether a file is of a kind that Pillow knows; only its head is read."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(file) as opened:
                return opened.format not in _DRAWINGS
        except Image.DecompressionBombError:
            return True
        except Exception:  # Pillow raises many kinds for damaged files
            return False


def pixels_of(content: bytes) -> int:
    """Return the number of pixels that an image says it has; 0 for what is none."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content)) as opened:
            return int(opened.width * opened.height)
    except Exception:  # said when it is decoded
        return 0


def decode(content: bytes) -> Any:
    """Decode an image of any mode to an 8-bit RGB `PIL.Image`, turned upright as its EXIF data says.

    Transparent pixels are laid over white. Colour profiles are not applied.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        opened = Image.open(io.BytesIO(content))
    except UnidentifiedImageError as error:  # whose own words are an address in memory
        raise OSError("no image of a known kind" if content else "the file is empty") from error
    with opened:
        if opened.format in _DRAWINGS:
            raise OSError(f"a drawing ({opened.format}), which has no pixels of its own")
        if opened.format in ("JPEG", "MPO"):
            _check_end(content)
        frames = getattr(opened, "n_frames", 1)
        if frames > 1 and opened.format != "MPO":  # of a camera: its other frames are smaller copies
            raise OSError(f"{frames} frames or pages; accepted: one image a file")
        if opened.mode.startswith(("F", "I")):
            raise OSError(f"samples of more than 8 bits (mode {opened.mode}); accepted: 8 bits")
        picture = ImageOps.exif_transpose(opened)
        if picture.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in picture.info:
            picture = picture.convert("RGBA")
            white = Image.new("RGBA", picture.size, "white")
            picture = Image.alpha_composite(white, picture)
        return picture.convert("RGB")


def _check_end(content: bytes) -> None:
    """Refuse a JPEG without an end: zeros after a broken download are decoded as grey, with no error."""
    place = 2
    while content[place : place + 1] == b"\xff" and content[place + 1 : place + 2] != _SCAN:
        filler = content[place + 1 : place + 2] == b"\xff"
        place += 1 if filler else 2 + int.from_bytes(content[place + 2 : place + 4])
    if content.find(_END, place) < 0:
        raise OSError("image file is truncated: it has no end")
