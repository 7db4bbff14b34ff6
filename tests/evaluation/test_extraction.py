"""Images of every kind of source: what is taken, what is said of the rest, how they are decoded and cut into chunks."""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.runs import (
    FILES,
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
    regions,
    tables,
)

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation import extraction, reference
from elfatt_sd.evaluation.extraction import SourceImages, _is_image, decode, extract, open_source
from elfatt_sd.evaluation.reference import Preprocessing


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
    kept = open_source(kind(tmp_path), per_class=1).entries
    assert len(kept) == len({entry.group for entry in kept}) == 3


def test_bad_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("empty", "shards", "rubbish"):
        (tmp_path / folder).mkdir()
    names = ("val.tar", "bad.parquet", "shards/val-000.tar", "shards/val-001.tar", "rubbish/0.png", "rubbish/1.png")
    for name in names:
        (tmp_path / name).write_bytes(b"x" * 2000)
    flat(tmp_path)
    cases = (
        ("", {}, "reference.source is missing"),
        ("nowhere", {}, "does not exist; accepted: a folder of images, .*; unpack archives first"),
        ("a\0b", {}, "does not exist"),
        ("gone.npz", {}, "does not exist"),
        ("empty", {}, "holds no image; accepted"),
        ("val.tar", {}, "a file of another kind; .* unpack archives first"),
        ("shards", {}, r"no image \(2 left out, being no images: val-000.tar, val-001.tar\); .* unpack archives first"),
        ("bad.parquet", {}, "bad.parquet cannot be read"),
        ("rubbish", {"count": 2}, "0 readable images; accepted are 2 or more; first: 0.png"),
        ("flat", {"per_class": 5}, "no classes, which per_class=5 needs; give one folder per class"),
    )
    for name, options, reason in cases:
        with pytest.raises(ElfattError, match=reason):
            build(tmp_path / name if name else "", tmp_path / "cache", **options)
    source, scan = classes(tmp_path), os.scandir

    def refuse(folder: Any) -> Any:
        if Path(folder).name == WNIDS[1]:
            raise PermissionError(13, "Permission denied", str(folder))
        return scan(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ElfattError, match=rf"{WNIDS[1]} cannot be read \(Permission denied\)"):
        open_source(source)


def test_what_is_no_image_is_left_out_and_named(tmp_path: Path) -> None:
    """Images under odd names are found; what is hidden, and what tells of images, is passed over in silence."""
    red = Image.new("RGB", (8, 8), "red")
    files = {
        "cat/photo.jfif": encoded(red, "JPEG"),
        "cat/photo.txt": b"a caption",
        "cat/scan.gif": encoded(red, "GIF"),
        "dog/noextension": encoded(red, "PNG"),
        "dog/map.pgm": encoded(red.convert("L"), "PPM"),
        "dog/weights.bin": b"rubbish",
        "photo.avif": b"rubbish",
    }
    hidden = [".ipynb_checkpoints/0.png", "cat/.thumbnails/0.png", "@eaDir/a.png", "dog/.partial.png", "dog/.DS_Store"]
    for name, content in {**files, **dict.fromkeys(hidden, encoded(red, "PNG"))}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    found = open_source(tmp_path)
    images = ["cat/photo.jfif", "cat/scan.gif", "dog/map.pgm", "dog/noextension", "photo.avif"]
    assert [entry.name for entry in found.entries] == images
    assert list(found.left_out) == ["dog/weights.bin"]
    with pytest.raises(ElfattError, match=r"has 5 images \(1 left out, being no images: dog/weights.bin\)"):
        build(tmp_path, tmp_path / ".cache", count=7)
    built = build(tmp_path, tmp_path / ".cache", count=5, allow_count=True)
    assert built.description["left_out"] == "1 left out, being no images: dog/weights.bin"
    assert built.unreadable == ["photo.avif (no image of a known kind)"]


def test_tables_and_their_columns(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    def table(name: str, **columns: Any) -> Path:
        pq.write_table(pa.table(columns), tmp_path / name, compression="none", use_dictionary=False)
        return tmp_path / name

    source = open_source(table("mask.parquet", mask=[b"no image"], image=[b"image"]))
    assert source.read(source.entries[0]) == b"image"
    with pytest.raises(ElfattError, match="has bytes in the columns before, after; accepted: one column"):
        open_source(table("two.parquet", before=[b"1"], after=[b"2"]))
    with pytest.raises(ElfattError, match="has no bytes in caption"):
        open_source(table("none.parquet", caption=["a"]))
    path = table("a.parquet", image=[b"image"], label=["name" * 9])  # labels are read before any image
    content = bytearray(path.read_bytes())
    start = content.index(b"name" * 9)
    content[start - 40 : start + 36] = b"\xff" * 76
    path.write_bytes(content)
    with pytest.raises(ElfattError, match=r"a\.parquet cannot be read") as raised:
        open_source(path)
    assert "\n" not in str(raised.value)
    folder = tables(tmp_path)
    (folder / "one.png").write_bytes(encoded(photo(1), "PNG"))
    (folder / "index.json").write_text("{}")
    assert list(open_source(folder).left_out) == ["one.png"]


def test_links_that_lead_back_count_once(tmp_path: Path) -> None:
    place = tmp_path / "top"
    place.mkdir()
    for _ in range(30):  # 2^30 paths
        (place / "a").mkdir()
        os.symlink("a", place / "b")
        place = place / "a"
    (place / "1.png").write_bytes(b"")
    assert len(open_source(tmp_path / "top").entries) == 1


def test_unreadable_pictures_are_named_and_counted(tmp_path: Path) -> None:
    source = flat(tmp_path)
    (source / "ILSVRC2012_val_00000002.JPEG").write_bytes(FILES["ILSVRC2012_val_00000002.JPEG"][:200])
    (source / "ILSVRC2012_val_00000005.JPEG").write_bytes(b"")
    with pytest.raises(ElfattError, match=r"2 images cannot be read, first ILSVRC2012_val_00000002.JPEG") as told:
        build(source, tmp_path / "cache")
    (listed,) = (tmp_path / "cache").glob("*/reference.json")
    assert str(listed) in str(told.value) and "--allow-count to go on with the other 10" in str(told.value)
    found = build(source, tmp_path / "cache", allow_count=True)
    assert (found.count, found.metric_suffix) == (10, " (10 reference images)")
    assert json.loads(listed.read_text())["unreadable"] == found.unreadable
    assert [line.split()[0][-10:] for line in found.unreadable] == ["00002.JPEG", "00005.JPEG"]
    assert found.unreadable[1].endswith("(the file is empty)")
    left = {name: content for name, content in FILES.items() if name[-7:] not in ("02.JPEG", "05.JPEG")}
    torch.testing.assert_close(found.statistics.mean, expected_statistics(left).mean, rtol=1e-6, atol=1e-7)


def test_what_is_no_file_is_unreadable(tmp_path: Path) -> None:
    source = flat(tmp_path)
    (source / "a.JPEG").symlink_to(tmp_path / "nowhere")
    (source / "b.JPEG").symlink_to(source / "b.JPEG")
    os.mkfifo(source / "c.JPEG")  # would be waited for
    lost, looping, pipe = build(source, tmp_path / "cache", allow_count=True).unreadable
    assert "No such file" in lost and "b.JPEG" in looping and pipe == "c.JPEG (it is not a plain file)"


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


def test_resize_is_shorter_side_and_centre() -> None:
    wide = Image.new("RGB", (60, 20), "red")
    wide.paste("blue", (20, 0, 40, 20))
    assert set(map(tuple, Preprocessing(10, "crop", "box")(wide).reshape(-1, 3).tolist())) == {(0, 0, 255)}
    assert Preprocessing(10, "stretch")(wide).shape == (10, 10, 3)
    assert Preprocessing()(wide).shape == (20, 60, 3)
    for wrong in ({"size": 8}, {"resize": "crop"}, {"size": 8, "resize": "fit"}, {"filter": "mitchell"}):
        with pytest.raises(ElfattError, match="accepted"):
            Preprocessing(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK"])
def test_images_without_transparency_are_read_as_pytorch_fid_and_clean_fid_do(mode: str) -> None:
    """Both take Pillow's conversion to RGB, which drops what is transparent; here that is laid over white."""
    pixels = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
    content = encoded(Image.fromarray(pixels).convert(mode), "TIFF")
    assert decode(content).tobytes() == Image.open(io.BytesIO(content)).convert("RGB").tobytes()
    clear = encoded(Image.new("RGBA", (1, 1), (200, 0, 0, 0)), "PNG")
    assert decode(clear).getpixel((0, 0)) == (255, 255, 255)


def test_pictures_are_turned_upright() -> None:
    image = Image.new("RGB", (8, 4), "white")
    exif = image.getexif()
    exif[0x0112] = 6  # rotate by a quarter
    assert decode(encoded(image, exif=exif)).size == (4, 8)


def test_what_cannot_be_decoded_without_loss_is_refused(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    deep = ((0.5, np.float32, "TIFF"), (40_000, np.uint16, "PPM"), (40_000, np.uint16, "PNG"), (7, np.int32, "TIFF"))
    drawing = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n"  # of another program's
    animated = [encoded(frames[0], kind, save_all=True, append_images=frames[1:]) for kind in ("GIF", "PNG", "TIFF")]
    cases = [(encoded(Image.fromarray(np.full((4, 4), value, kind)), form), "8 bits") for value, kind, form in deep]
    cases += [(content, "2 frames or pages; accepted: one image a file") for content in animated]
    for content, reason in [*cases, (drawing, r"a drawing \(EPS\), which has no pixels of its own")]:
        with pytest.raises(OSError, match=reason):
            decode(content)
    (tmp_path / "drawing").write_bytes(drawing)
    assert not _is_image(tmp_path / "drawing")


def _jpeg(size: int, **options: Any) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8)
    return encoded(Image.fromarray(pixels), "JPEG", **options)


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


def test_pictures_of_different_sizes_need_no_resizing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for number, size in enumerate(((16, 24), (40, 16), (16, 24))):
        (tmp_path / "a" / f"{number}.png").write_bytes(encoded(photo(number, size), "PNG"))
    assert build(tmp_path / "a", tmp_path / "cache", count=3).count == 3


def test_a_batch_of_large_pictures_is_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "LARGEST_BATCH", 3 * 40 * 32)  # bytes of one
    extractor, sizes = regions(), list[int]()
    extractor.network.register_forward_hook(lambda module, given, out: sizes.append(len(out)))
    extract(SourceImages(open_source(flat(tmp_path))), extractor, tmp_path / "rows")
    assert sum(sizes) == PHOTOS and max(sizes) == 2


def test_progress_is_told_once_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it is of and the time left; what was there before does not count as speed."""
    clock, lines = [0.0], list[str]()
    monkeypatch.setattr("elfatt_sd.progress.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(extraction, "CHUNK", 4)
    monkeypatch.setattr(extraction, "BATCH", 1)
    slow = regions()
    pictures = SourceImages(open_source(flat(tmp_path)))
    slow.network.register_forward_hook(lambda *_: clock.append(clock.pop() + 20))
    extract(pictures, slow, tmp_path / "rows", progress=extraction.every_minute(lines.append))
    assert lines == [
        f"measuring: regions, {done} of 12 images done, about 0:0{3 - index}:00 left"
        for index, done in enumerate((3, 6, 9, 12))
    ]
    lines.clear()
    (tmp_path / "rows" / "chunk-00002.npz").unlink()
    extract(pictures, slow, tmp_path / "rows", progress=extraction.every_minute(lines.append))
    assert lines == ["measuring: regions, 11 of 12 images done, about 0:00:20 left"]


def test_sample_is_evenly_spaced_over_all_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "CHUNK", 5)
    monkeypatch.setattr(reference, "KERNEL_SAMPLE", 4)
    found = build(flat(tmp_path), tmp_path / "cache")
    images = [np.array(decode(FILES[sorted(FILES)[place]])) for place in (0, 3, 6, 9)]
    rows = [regions()(torch.from_numpy(image).permute(2, 0, 1)[None])[0] for image in images]
    assert found.sample is not None
    np.testing.assert_allclose(found.sample, torch.stack(rows).numpy(), rtol=1e-6)
