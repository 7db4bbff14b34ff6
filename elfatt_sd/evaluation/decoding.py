"""Decode images of any kind to 8-bit RGB, or refuse what cannot be read rightly."""

from __future__ import annotations

import io
import warnings
from typing import IO, Any

DECODING = 3  # goes up when the same file gives other pixels, or none
_SCAN, _END = b"\xda", b"\xff\xd9"  # of JPEG: the mark that data follow, and that of the end
_DRAWINGS = ("EPS", "WMF")  # another program would draw them
_SAMPLES = {"I": 65535, "I;16": 65535, "I;16B": 65535, "I;16L": 65535, "I;16N": 65535}
_BITS_PER_SAMPLE, _SUBFILE, _REDUCED_OR_MASK = 258, 254, 0b101  # tags of TIFF; the last is a mask of the second one


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

    Transparent pixels are laid over white. Samples of 9 to 16 bits keep their upper 8. Floating-point samples count
    from 0 to 1, or from 0 to 255 where all are whole numbers and one is above 1. Colour profiles are not applied.

    Raises:
        OSError: it is not an image, is truncated, has several frames or pages, or its samples have no known scale;
            errors of other kinds of damage pass as they are.
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
        _check_single(opened)
        picture = _eight_bit(opened, ImageOps.exif_transpose(opened))
        if picture.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in picture.info:
            picture = picture.convert("RGBA")
            white = Image.new("RGBA", picture.size, "white")
            picture = Image.alpha_composite(white, picture)
        return picture.convert("RGB")


def _check_end(content: bytes) -> None:
    """Refuse a JPEG without an end: zeros after a broken download are decoded as grey, with no error.

    Before its data there are segments, each of which tells its length; thumbnails in them have ends of their own.
    """
    place = 2
    while content[place : place + 1] == b"\xff" and content[place + 1 : place + 2] != _SCAN:
        filler = content[place + 1 : place + 2] == b"\xff"
        place += 1 if filler else 2 + int.from_bytes(content[place + 2 : place + 4])
    if content.find(_END, place) < 0:
        raise OSError("image file is truncated: it has no end")


def _check_single(opened: Any) -> None:
    """Refuse an animation or several pages; smaller copies and masks of one image are not pages."""
    frames = getattr(opened, "n_frames", 1)
    if frames == 1 or opened.format in ("MPO", "PSD"):  # a camera's further views; layers, of which the first is all
        return
    if opened.format != "TIFF":
        raise OSError(f"an animation of {frames} frames; accepted: one image a file")
    pages = 0
    for number in range(frames):
        opened.seek(number)
        pages += not opened.tag_v2.get(_SUBFILE, 0) & _REDUCED_OR_MASK
    opened.seek(0)
    if pages > 1:
        raise OSError(f"{pages} pages; accepted: one image a file")


def _eight_bit(opened: Any, picture: Any) -> Any:
    """Bring samples of more than 8 bits to 8, with the scale that the file has.

    Raises:
        OSError: the scale is not known.
    """
    if picture.mode == "F":
        return _from_floats(picture)
    if picture.mode not in _SAMPLES:
        return picture
    import numpy as np
    from PIL import Image

    samples = np.asarray(picture).astype(np.int64)
    bits = _bits(opened)
    if bits > 16:  # 32-bit integers have no white of their own
        low, high = int(samples.min()), int(samples.max())
        if low < 0 or not 255 < high < 65536:
            raise OSError(f"integers of {bits} bits from {low} to {high}; accepted: 8 or 16 bits, or values like these")
        bits = 16
    if samples.min() < 0:
        raise OSError("negative samples; accepted: whole numbers from 0 on")
    grey = Image.fromarray((samples >> (bits - 8)).astype(np.uint8))
    transparent = picture.info.get("transparency")
    if isinstance(transparent, int):
        mask = np.where(samples == transparent, 0, 255).astype(np.uint8)
        grey.putalpha(Image.fromarray(mask))
    return grey


def _bits(opened: Any) -> int:
    """Return the bits of a sample of a grey image that has more than 8."""
    if opened.format == "TIFF":
        return int(opened.tag_v2.get(_BITS_PER_SAMPLE, (16,))[0])
    return 16 if opened.mode != "I" or opened.format in ("PNG", "PPM", "JPEG2000") else 32


def _from_floats(picture: Any) -> Any:
    import numpy as np
    from PIL import Image

    samples = np.asarray(picture, dtype=np.float64)
    low, high = float(samples.min()), float(samples.max())
    if not (np.isfinite(samples).all() and low >= 0 and high <= 255):
        raise OSError(f"floating-point samples from {low:.4g} to {high:.4g}; accepted: 0 to 1")
    whole = bool((samples == samples.round()).all())
    if high > 1 and not whole:
        raise OSError(f"floating-point samples up to {high:.4g}, not whole; accepted: 0 to 1, or whole from 0 to 255")
    return Image.fromarray((samples * (255 if high <= 1 else 1)).round().astype(np.uint8))
