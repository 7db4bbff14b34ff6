"""Decoding images of every mode and depth; what has no known scale is refused."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from elfatt_sd.evaluation.decoding import decode, is_image


def saved(image: Image.Image, format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def grey(samples: Any, dtype: Any) -> Image.Image:
    return Image.fromarray(np.full((4, 4), samples, dtype=dtype))


def first_pixel(content: bytes) -> Any:
    return decode(content).getpixel((0, 0))


def test_floats_and_deep_samples_have_their_scale() -> None:
    assert first_pixel(saved(grey(0.5, np.float32), "TIFF")) == (128, 128, 128)
    assert first_pixel(saved(grey(200, np.float32), "TIFF")) == (200, 200, 200)
    assert first_pixel(saved(grey(200 * 256, np.uint16), "TIFF")) == (200, 200, 200)
    assert first_pixel(saved(grey(200 * 256, np.uint16), "PPM")) == (200, 200, 200)
    assert first_pixel(b"P5 1 1 1023 " + (800).to_bytes(2, "big")) == (200, 200, 200)
    for samples, dtype in ((200.5, np.float32), (-1.0, np.float32), (np.nan, np.float32), (300.0, np.float32)):
        with pytest.raises(OSError, match=r"floating-point samples .* accepted: 0 to 1"):
            decode(saved(grey(samples, dtype), "TIFF"))
    for samples in (200, 70_000, -5):
        with pytest.raises(OSError, match=f"integers of 32 bits from {samples} to {samples}; accepted: 8 or 16"):
            decode(saved(grey(samples, np.int32), "TIFF"))


def test_twelve_bits_are_not_read_as_sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    content = saved(grey(200 * 16, np.uint16), "TIFF", tiffinfo={})
    monkeypatch.setattr("elfatt_sd.evaluation.decoding._bits", lambda opened: 12)
    assert first_pixel(content) == (200, 200, 200)


def test_drawings_are_not_handed_to_another_program() -> None:
    drawing = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n"
    assert not is_image(io.BytesIO(drawing))
    with pytest.raises(OSError, match=r"a drawing \(EPS\), which has no pixels of its own"):
        decode(drawing)


def test_deep_transparent_pixels_are_white() -> None:
    clear = saved(grey(200 * 256, np.uint16), "PNG", transparency=200 * 256)
    assert first_pixel(clear) == (255, 255, 255)


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "TIFF"])
def test_animations_and_pages_are_refused(format: str) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    assert first_pixel(saved(frames[0], format, lossless=True))[1:] == (0, 0)
    with pytest.raises(OSError, match=r"2 (frames|pages)|of 2 frames; accepted: one image a file"):
        decode(saved(frames[0], format, save_all=True, append_images=frames[1:]))


def test_smaller_copies_are_no_pages() -> None:
    whole, small = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (4, 4), "blue")
    small.encoderinfo = {"tiffinfo": {254: 1}}  # type: ignore[attr-defined]
    content = saved(whole, "TIFF", save_all=True, append_images=[small])
    assert decode(content).size == (8, 8)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK"])
def test_images_without_transparency_are_read_as_pytorch_fid_and_clean_fid_do(mode: str) -> None:
    """Both take Pillow's conversion to RGB, which drops what is transparent; here that is laid over white."""
    pixels = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
    content = saved(Image.fromarray(pixels).convert(mode), "TIFF")
    assert decode(content).tobytes() == Image.open(io.BytesIO(content)).convert("RGB").tobytes()
    clear = saved(Image.new("RGBA", (1, 1), (200, 0, 0, 0)), "PNG")
    assert first_pixel(clear) == (255, 255, 255)


def _jpeg(size: int, **options: Any) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG", **options)
    return buffer.getvalue()


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("thumbnail", [b"", _jpeg(16)])
def test_a_jpeg_that_goes_on_as_zeros_is_refused(progressive: bool, thumbnail: bytes) -> None:
    """As a broken download leaves it; the end of a thumbnail is not that of the image."""
    exif = {"exif": b"Exif\0\0" + thumbnail} if thumbnail else {}
    whole = _jpeg(64, progressive=progressive, **exif)
    half = len(whole) * 2 // 3
    assert decode(whole + b"more").size == (64, 64)
    with pytest.raises(OSError, match="truncated"):
        decode(whole[:half] + bytes(len(whole) - half))
