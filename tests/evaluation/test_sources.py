"""Every kind of source of reference images, what is taken from it, what is said of the rest, and how it is decoded."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.runs import (
    KINDS,
    PHOTOS,
    WNIDS,
    build,
    classes,
    encoded,
    expected_statistics,
    flat,
    linked_classes,
    parquet,
    photo,
    tables,
)

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation import extraction
from elfatt_sd.evaluation.extraction import Preprocessing, SourceImages
from elfatt_sd.evaluation.sources import decode, is_image, left_out_words, open_source


@pytest.mark.parametrize("kind", KINDS)
def test_every_source_gives_the_same_statistics(kind: Callable[[Path], Path], tmp_path: Path) -> None:
    found = build(kind(tmp_path), tmp_path / "cache")
    expected = expected_statistics()
    assert (found.count, found.unreadable, found.metric_suffix) == (PHOTOS, [], " (12 reference images)")
    torch.testing.assert_close(found.statistics.mean, expected.mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found.statistics.covariance, expected.covariance, rtol=1e-5, atol=1e-8)
    assert found.sample is not None
    assert found.sample.shape == (PHOTOS, 12)


@pytest.mark.parametrize("kind", [classes, linked_classes, parquet, tables])
def test_first_pictures_of_each_class(kind: Callable[[Path], Path], tmp_path: Path) -> None:
    source = kind(tmp_path)
    kept = open_source(source, per_class=1).entries
    assert len(kept) == len({entry.group for entry in kept}) == 3
    assert build(source, tmp_path / "cache", per_class=1, expected=3).count == 3


def test_a_flat_source_has_no_classes(tmp_path: Path) -> None:
    with pytest.raises(ElfattError, match=r"no classes, which per_class=5 needs; give one folder per class"):
        open_source(flat(tmp_path), per_class=5)


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, scan = classes(tmp_path), os.scandir

    def refuse(folder: Path) -> Any:
        if folder.name == WNIDS[1]:
            raise PermissionError(13, "Permission denied", str(folder))
        return scan(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ElfattError, match=rf"{WNIDS[1]} cannot be read \(Permission denied\)"):
        open_source(source)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    source = flat(tmp_path)
    os.mkfifo(source / "a.JPEG")
    (pipe,) = build(source, tmp_path / "cache", allow_count=True).unreadable
    assert pipe == "a.JPEG (it is not a plain file)"


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), MemoryError("no memory")])
def test_what_may_pass_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """A disk that does not answer once would leave its pictures out of every later run."""
    source, answers = flat(tmp_path), [error]

    def once(content: bytes) -> Any:
        if answers:
            raise answers.pop()
        return decode(content)

    monkeypatch.setattr(extraction, "decode", once)
    with pytest.raises((ElfattError, MemoryError), match=r"\.JPEG cannot be read: Input/output error; give|no memory"):
        build(source, tmp_path / "cache", allow_count=True)
    assert (found := build(source, tmp_path / "cache")).count == PHOTOS
    assert found.unreadable == []


def test_bad_sources(tmp_path: Path) -> None:
    for folder in ("empty", "shards"):
        (tmp_path / folder).mkdir()
    for name in ("val.tar", "bad.parquet", "shards/val-000.tar", "shards/val-001.tar"):
        (tmp_path / name).write_bytes(b"x" * 2000)
    cases = (
        ("", "missing"),
        ("nowhere", "does not exist; accepted: a folder of images, .*; unpack archives first"),
        ("val-{000..001}.tar", "does not exist"),
        ("a\0b", "does not exist"),
        ("empty", "holds no image; accepted"),
        ("val.tar", "a file of another kind; .* unpack archives first"),
        (
            "shards",
            r"no image \(2 left out \(hidden, or no image\): val-000.tar, val-001.tar\); .* unpack archives first",
        ),
        ("bad.parquet", "bad.parquet cannot be read"),
        ("gone.npz", "does not exist"),
    )
    for name, reason in cases:
        with pytest.raises(ElfattError, match=reason):
            build(tmp_path / name if name else "", tmp_path / "cache")


def test_nothing_readable(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for number in range(2):
        (tmp_path / "a" / f"{number}.png").write_bytes(b"rubbish")
    with pytest.raises(ElfattError, match=r"0 readable images; accepted are 2 or more; first: 0.png"):
        build(tmp_path / "a", tmp_path / "cache", expected=2)


def mixed() -> dict[str, bytes]:
    """Files of many kinds: images under odd names, what tells of an image, and what is none."""
    red = Image.new("RGB", (8, 8), "red")
    return {
        "a/photo.jfif": encoded(red, "JPEG"),
        "a/photo.txt": b"a caption",
        "a/scan.gif": encoded(red, "GIF"),
        "b/noextension": encoded(red, "PNG"),
        "b/map.pgm": encoded(red.convert("L"), "PPM"),
        "b/notes.txt": b"of no image",
        "b/weights.bin": b"rubbish",
        "b/.DS_Store": b"",
        "photo.avif": b"rubbish",
    }


IMAGES = ["a/photo.jfif", "a/scan.gif", "b/map.pgm", "b/noextension", "photo.avif"]


LEFT_OUT = ["b/notes.txt", "b/weights.bin"]


def test_what_is_left_out_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    for name, content in mixed().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    found = open_source(folder)
    assert [entry.name for entry in found.entries] == IMAGES
    assert list(found.left_out) == LEFT_OUT
    with pytest.raises(ElfattError, match=r"has 5 images \(2 left out \(hidden, or no image\): b/notes.txt, b/weights"):
        build(folder, tmp_path / "cache", expected=7)
    built = build(folder, tmp_path / "cache", expected=5, allow_count=True)
    assert built.description["left_out"] == "2 left out (hidden, or no image): b/notes.txt, b/weights.bin"
    assert built.unreadable == ["photo.avif (no image of a known kind)"]


@pytest.mark.parametrize(
    "hidden", [".ipynb_checkpoints", ".thumbnails", ".cache/huggingface", "@eaDir", "#recycle", "lost+found"]
)
def test_what_is_hidden_is_no_image_and_no_class(tmp_path: Path, hidden: str) -> None:
    content = encoded(Image.new("RGB", (8, 8)), "PNG")
    kept = [f"{group}/{number}.png" for group in ("cat", "dog") for number in range(2)]
    litter = [f"{hidden}/0.png", f"cat/{hidden}/0-checkpoint.png", "dog/.partial.png"]
    for name in (*kept, *litter):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    found = open_source(tmp_path, per_class=2)
    assert [Path(entry.name).as_posix() for entry in found.entries] == kept
    assert {entry.group for entry in found.entries} == {"cat", "dog"}
    place = hidden.split("/")[0]
    assert len(found.left_out) == 3 and sum(place in name for name in found.left_out) == 2
    assert left_out_words(found.left_out).startswith("3 left out (hidden, or no image): ")


def test_a_folder_of_tables_names_what_lies_beside(tmp_path: Path) -> None:
    source = tables(tmp_path)
    (source / "one.png").write_bytes(encoded(photo(1), "PNG"))
    (source / "index.json").write_text("{}")
    assert list(open_source(source).left_out) == ["one.png"]


def test_damaged_pages_of_a_table_are_told(tmp_path: Path) -> None:
    """Labels are read before any image, each image when it is wanted."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(
        pa.table({"image": [b"image"], "label": ["name" * 9]}), path, compression="none", use_dictionary=False
    )
    content = bytearray(path.read_bytes())
    start = content.index(b"name" * 9)
    content[start - 40 : start + 36] = b"\xff" * 76
    path.write_bytes(content)
    with pytest.raises(ElfattError, match=r"a\.parquet cannot be read") as raised:
        open_source(path)
    assert "\n" not in str(raised.value)


def test_the_column_of_images_is_taken_or_asked_for(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    def table(name: str, **columns: Any) -> Path:
        parquet.write_table(pa.table(columns), tmp_path / name)
        return tmp_path / name

    source = open_source(table("mask.parquet", mask=[b"no image"], image=[b"image"]))
    assert source.read(source.entries[0]) == b"image"
    with pytest.raises(ElfattError, match="has bytes in before, after; accepted: one column"):
        open_source(table("two.parquet", before=[b"1"], after=[b"2"]))
    with pytest.raises(ElfattError, match="has columns caption; one must hold the bytes of images"):
        open_source(table("none.parquet", caption=["a"]))


def test_files_with_holes_are_not_read(tmp_path: Path) -> None:
    """They take no disk, and more memory than there is."""
    (tmp_path / "a.png").write_bytes(encoded(photo(1), "PNG"))
    with (tmp_path / "b.png").open("wb") as file:
        file.truncate(1 << 40)
    first, second = (SourceImages(open_source(tmp_path), Preprocessing()).load(start, start + 1) for start in (0, 1))
    assert np.asarray(next(first)).shape == (32, 40, 3)
    assert next(second) == "b.png (1024 GiB; accepted: at most 1 GiB an image)"


def test_links_without_end(tmp_path: Path) -> None:
    place = tmp_path / "top"
    place.mkdir()
    for _ in range(40):  # 2^40 paths
        (place / "a").mkdir()
        os.symlink("a", place / "b")
        place = place / "a"
    (place / "1.png").write_bytes(b"")
    with pytest.raises(ElfattError, match=r"links lead to .* by more than 64 paths"):
        open_source(tmp_path / "top")


def test_large_pictures_are_decoded_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As four threads would hold a dozen of them otherwise, each of several gigabytes."""
    for index in range(6):
        side = 8 if index % 2 else 64
        (tmp_path / f"{index}.png").write_bytes(encoded(photo(index, (side, side)), "PNG"))
    monkeypatch.setattr(extraction, "LARGE", 100)
    held: list[int] = []

    def watched(content: bytes) -> Any:
        image = decode(content)
        held.append(image.width)
        return image

    monkeypatch.setattr(extraction, "decode", watched)
    pictures = SourceImages(open_source(tmp_path), Preprocessing()).load(0, 6)
    first = next(pictures)
    assert held.count(64) == 1
    found = [first, *pictures]
    assert [np.asarray(each).shape for each in found] == [(64, 64, 3), (8, 8, 3)] * 3


def saved(image: Image.Image, format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def first_pixel(content: bytes) -> Any:
    return decode(content).getpixel((0, 0))


@pytest.mark.parametrize(
    ("samples", "dtype", "format"),
    [
        (0.5, np.float32, "TIFF"),
        (40_000, np.uint16, "TIFF"),
        (40_000, np.uint16, "PPM"),
        (40_000, np.uint16, "PNG"),
        (7, np.int32, "TIFF"),
    ],
)
def test_samples_of_more_than_8_bits_are_refused(samples: float, dtype: Any, format: str) -> None:
    with pytest.raises(OSError, match=r"samples of more than 8 bits \(mode .*\); accepted: 8 bits"):
        decode(saved(Image.fromarray(np.full((4, 4), samples, dtype=dtype)), format))


def test_drawings_are_not_handed_to_another_program() -> None:
    drawing = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n"
    assert not is_image(io.BytesIO(drawing))
    with pytest.raises(OSError, match=r"a drawing \(EPS\), which has no pixels of its own"):
        decode(drawing)


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "TIFF"])
def test_animations_and_pages_are_refused(format: str) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    assert first_pixel(saved(frames[0], format, lossless=True))[1:] == (0, 0)
    with pytest.raises(OSError, match="2 frames or pages; accepted: one image a file"):
        decode(saved(frames[0], format, save_all=True, append_images=frames[1:]))


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
