"""Images of a reference and their statistics: what is taken, decoded, refused, kept, shared between processes."""

from __future__ import annotations

import errno
import io
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import runs
from support.runs import FILES, PHOTOS, build, encoded, expected_statistics, flat, photo, regions

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation import extraction, reference
from elfatt_sd.evaluation.extraction import decode, extract, open_source, read_chunk
from elfatt_sd.evaluation.reference import renders, resized, scenes


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dozen photos in a folder, of which 5 make a chunk and 2 a batch."""
    monkeypatch.setattr(extraction, "CHUNK", 5)
    monkeypatch.setattr(extraction, "BATCH", 2)
    return flat(tmp_path)


@pytest.mark.parametrize("kind", runs.KINDS)
def test_every_source_gives_the_same_statistics(kind: Callable[[Path], Path], tmp_path: Path) -> None:
    place = kind(tmp_path)
    found = build(place, tmp_path / "cache")
    mean, covariance = expected_statistics()
    counted = (found.description["count"], found.description["unreadable"], found.metric_suffix)
    assert counted == (PHOTOS, [], " (12 reference images)")
    torch.testing.assert_close(found.mean, mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found.covariance, covariance, rtol=1e-5, atol=1e-8)
    assert found.sample is not None and found.sample.shape == (PHOTOS, 12)
    if kind is not flat:
        kept = open_source(place, per_class=1).entries
        assert len(kept) == len({entry.group for entry in kept}) == 3


def test_bad_sources(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("empty", "shards", "rubbish"):
        (tmp_path / folder).mkdir()
    for name in ("val.tar", "bad.parquet", "shards/val-000.tar", "rubbish/0.png", "rubbish/1.png"):
        (tmp_path / name).write_bytes(b"x" * 2000)
    cases: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("", {}, "reference.source is missing"),
        ("nowhere", {}, "does not exist; accepted: a folder of images, .*; unpack archives first"),
        ("a\0b", {}, "does not exist"),
        ("gone.npz", {}, "does not exist"),
        ("empty", {}, "holds no image; accepted"),
        ("val.tar", {}, "a file of another kind; .* unpack archives first"),
        ("shards", {}, "holds no image; .* unpack archives first"),
        ("bad.parquet", {}, "bad.parquet cannot be read"),
        ("rubbish", {"count": 2}, "0 images, and 2 that cannot be read, first 0.png .*; accepted are 2"),
        ("flat", {"per_class": 5}, "no classes, which per_class=5 needs; give one folder per class"),
        ("flat", {"count": 50_000}, "has 12 images; accepted are 50000, or give --allow-count"),
        ("flat", {"size": 8}, "accepted"),
        ("flat", {"resize": "crop"}, "accepted"),
    )
    for name, options, reason in cases:
        with pytest.raises(ElfattError, match=reason):
            build(tmp_path / name if name else "", tmp_path / "cache", **options)


def test_columns_of_tables(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    red, place = encoded(Image.new("RGB", (8, 8), "red"), "PNG"), tmp_path / "val.parquet"
    parquet.write_table(pa.table({"mask": [b"no image"], "image": [red]}), place)
    assert [image.shape for image in open_source(place).load(range(1))] == [(8, 8, 3)]  # type: ignore[union-attr]
    two = "has bytes in the columns before, after; accepted: one column"
    for columns, reason in (({"before": [red], "after": [red]}, two), ({"caption": ["a"]}, "has no bytes in caption")):
        parquet.write_table(pa.table(columns), place)
        with pytest.raises(ElfattError, match=reason):
            open_source(place)


def test_what_is_no_image_or_hidden_is_passed_over(tmp_path: Path) -> None:
    red = encoded(Image.new("RGB", (8, 8), "red"), "PNG")
    seen = ("cat/scan.gif", "dog/map.pgm", "photo.avif")
    hidden = (".ipynb_checkpoints/0.png", "cat/.thumbnails/0.png", "@eaDir/a.png", "dog/.partial.png", "dog/.DS_Store")
    for name in (*seen, *hidden, "cat/scan.txt", "dog/weights.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(red)
    assert [Path(entry.name).name for entry in open_source(tmp_path).entries] == ["scan.gif", "map.pgm", "photo.avif"]
    with pytest.raises(ElfattError, match="has 3 images; accepted are 7"):
        build(tmp_path, tmp_path / ".cache", count=7)


def test_unreadable_pictures_are_named_and_counted(source: Path, tmp_path: Path) -> None:
    torn, empty = (f"ILSVRC2012_val_0000000{number}.JPEG" for number in (2, 5))
    (source / torn).write_bytes(FILES[torn][:200])
    (source / empty).write_bytes(b"")
    with pytest.raises(ElfattError, match=rf"10 images, and 2 that cannot be read, first {torn}.* --allow-count"):
        build(source, tmp_path / "cache")
    found = build(source, tmp_path / "cache", allow_count=True)
    assert (found.description["count"], found.metric_suffix) == (10, " (10 reference images)")
    assert [line.split()[0] for line in found.description["unreadable"]] == [torn, empty]
    assert found.description["unreadable"][1].endswith("(the file is empty)")
    left = {name: content for name, content in FILES.items() if name not in (torn, empty)}
    torch.testing.assert_close(found.mean, expected_statistics(left)[0], rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # numpy leaves a damaged zip open
@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), MemoryError("no memory")])
def test_what_may_pass_is_not_kept_and_the_work_goes_on(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A disk that does not answer once would leave its pictures out of every later run; nor does a damaged chunk."""
    answers = [None] * 7 + [error]

    def once(content: bytes) -> Any:
        if answers and (wrong := answers.pop(0)):
            raise wrong
        return decode(content)

    monkeypatch.setattr(extraction, "decode", once)
    monkeypatch.setattr(reference, "KERNEL_SAMPLE", 4)
    with pytest.raises((ElfattError, MemoryError), match=r"\.JPEG cannot be read \(Input/output error\)|no memory"):
        build(source, tmp_path / "cache", allow_count=True)
    extractor, whole = regions(), build(source, tmp_path / "whole")
    found = build(source, tmp_path / "cache", extractor)
    assert 0 < int(extractor.network.calls) < PHOTOS  # type: ignore[arg-type]
    assert (found.description["count"], found.description["unreadable"], found.identity) == (PHOTOS, [], whole.identity)
    assert torch.equal(found.covariance, whole.covariance)
    chunks = extract(open_source(source), regions(), tmp_path / "rows")
    features, other = [read_chunk(path)[0] for path in chunks], io.BytesIO()
    for each in (found, whole):  # the sample is evenly spaced over all chunks
        assert each.sample is not None and torch.equal(each.sample, torch.cat(features)[::3])
    np.savez(other, features=features[2][1:], unreadable=np.array("[]"))
    for path, content in zip(chunks, (b"", b"PK\x03\x04 no zip", other.getvalue()), strict=True):
        path.write_bytes(content)
    again = [read_chunk(path)[0] for path in extract(open_source(source), regions(), tmp_path / "rows")]
    assert all(torch.equal(*pair) for pair in zip(features, again, strict=True))


def test_images_are_decoded_as_pytorch_fid_and_clean_fid_do() -> None:
    """Both take Pillow's conversion to RGB, which drops what is transparent; here that is laid over white."""
    pixels = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
    for mode in ("1", "L", "P", "RGB", "CMYK"):
        content = encoded(Image.fromarray(pixels).convert(mode), "TIFF")
        assert decode(content).tobytes() == Image.open(io.BytesIO(content)).convert("RGB").tobytes()
    assert decode(encoded(Image.new("RGBA", (1, 1), (200, 0, 0, 0)), "PNG")).getpixel((0, 0)) == (255, 255, 255)
    image = Image.new("RGB", (8, 4), "white")
    exif = image.getexif()
    exif[0x0112] = 6  # rotate by a quarter
    assert decode(encoded(image, exif=exif)).size == (4, 8)
    wide = Image.new("RGB", (60, 20), "red")
    wide.paste("blue", (20, 0, 40, 20))
    assert resized(wide, 10, "crop", "box").getcolors() == [(100, (0, 0, 255))]
    assert resized(wide, 10, "stretch", "bicubic").size == (10, 10)
    assert resized(wide, 0, "none", "bicubic").size == (60, 20)


def test_what_cannot_be_decoded_without_loss_is_refused() -> None:
    """Such as a JPEG that goes on as zeros after a broken download; the end of a thumbnail is not that of the image."""
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    deep = ((0.5, np.float32, "TIFF"), (40_000, np.uint16, "PPM"), (40_000, np.uint16, "PNG"), (7, np.int32, "TIFF"))
    drawing = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n"  # of another program's
    animated = [encoded(frames[0], kind, save_all=True, append_images=frames[1:]) for kind in ("GIF", "PNG", "TIFF")]
    cases = [(encoded(Image.fromarray(np.full((4, 4), value, kind)), form), "8 bits") for value, kind, form in deep]
    cases += [(content, "2 frames or pages; accepted: one image a file") for content in animated]
    cases.append((drawing, r"a drawing \(EPS\), which has no pixels of its own"))

    def jpeg(size: int, **options: Any) -> bytes:
        pixels = np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8)
        return encoded(Image.fromarray(pixels), "JPEG", **options)

    for progressive, more in itertools.product((False, True), ({}, {"exif": b"Exif\0\0" + jpeg(16)})):
        whole = jpeg(64, progressive=progressive, **more)
        half = len(whole) * 2 // 3
        assert decode(whole + b"more").size == (64, 64)
        cases.append((whole[:half] + bytes(len(whole) - half), "truncated"))
    for content, reason in cases:
        with pytest.raises(OSError, match=reason):
            decode(content)


def test_cache_is_used_until_something_changes(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"

    def calls(**options: Any) -> int:
        extractor = regions()
        build(source, cache, extractor, **options)
        return int(extractor.network.calls)  # type: ignore[arg-type]

    with ThreadPoolExecutor(2) as pool:  # as two runs, of which the second waits for the first
        assert sorted(pool.map(lambda _: calls(), range(2))) == [0, PHOTOS]
    assert calls() == calls(count=50_000, allow_count=True) == 0
    assert calls(size=16, resize="crop") == calls(size=16, resize="crop", filter="lanczos") == PHOTOS
    changed = source / "ILSVRC2012_val_00000003.JPEG"
    changed.write_bytes(encoded(photo(99)))
    os.utime(changed, ns=(1, 1))
    assert calls() == PHOTOS
    assert not [*cache.rglob("*.part")]
    monkeypatch.setattr(reference, "FULL_COUNT", PHOTOS)
    assert build(source, cache).metric_suffix == ""
    assert build(source, cache, size=16, resize="crop").metric_suffix == " (reference cropped to 16)"
    # images of different sizes go through the network one by one, and fewer large ones together
    for number, size in enumerate(((16, 24), (40, 16), (16, 24))):
        (source / f"{number}.png").write_bytes(encoded(photo(number, size), "PNG"))
    monkeypatch.setattr(extraction, "BATCH", 32)
    monkeypatch.setattr(extraction, "LARGEST_BATCH", 3 * 40 * 32)  # bytes of one
    extractor, sizes = regions(), list[int]()
    extractor.network.register_forward_hook(lambda module, given, out: sizes.append(len(out)))
    assert build(source, cache, extractor, count=PHOTOS + 3).description["count"] == sum(sizes) == PHOTOS + 3
    assert max(sizes) == 2


def test_processes_share_the_work_and_agree(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, and with made-up answers of another one; `test_generate.py` starts two."""
    for rank, share in ((1, 5), (0, 7)):
        state, extractor = SimpleNamespace(process_index=rank, num_processes=2), regions()
        with monkeypatch.context() as patch:
            patch.setattr(extraction, "process_state", lambda state=state: state)
            chunks = extract(open_source(source), extractor, tmp_path / "rows")
        assert int(extractor.network.calls) == share  # type: ignore[arg-type]
    features = torch.cat([read_chunk(path)[0] for path in chunks])
    torch.testing.assert_close(features.double().mean(0), expected_statistics()[0], rtol=1e-6, atol=1e-7)
    told: list[Any] = []
    monkeypatch.setattr(extraction, "among_others", lambda: True)
    for kind, answer, said in (
        (type(None), "the cable is out", "the cable is out"),
        (str, "another", r"not the same in all processes \(names, sizes"),
        (tuple, (False, "b"), "not that of another process, b; set ELFATT"),
    ):

        def gather(own: list[Any], kind: Any = kind, answer: Any = answer) -> list[Any]:
            told.extend(own)
            return [*own, *(answer if isinstance(each, kind) else each for each in own)]

        monkeypatch.setattr("accelerate.utils.gather_object", gather)
        with pytest.raises(ElfattError, match=said):
            build(source, tmp_path / "cache")
    with pytest.raises(ElfattError, match="nowhere does not exist"):
        build(tmp_path / "nowhere", tmp_path / "cache")
    assert "nowhere does not exist" in told[-1], "the others fail, too"
    assert not [*tmp_path.rglob(".seen-*")]


def test_statistics_of_another_tool(tmp_path: Path) -> None:
    mean, covariance = expected_statistics()
    sigma = covariance.float().numpy()
    sigma[0, 1] *= 1 + 1e-6  # rounding of single precision
    np.savez(tmp_path / "other.npz", mu=mean, sigma=sigma)
    found = build(tmp_path / "other.npz", tmp_path)
    assert (found.sample, found.description["count"], found.metric_suffix) == (None, None, " (statistics of other.npz)")
    torch.testing.assert_close(found.covariance, covariance, rtol=1e-5, atol=1e-6)
    assert torch.equal(found.covariance, found.covariance.T)
    impossible: list[tuple[dict[str, Any], str]] = [
        ({"sigma": np.diag([-1.0] + 11 * [1.0])}, "negative eigenvalue"),
        ({"sigma": np.triu(np.ones((12, 12)))}, "not symmetric"),
        ({"sigma": np.full((12, 12), np.nan)}, "NaN"),
        ({"sigma": np.eye(12) * 1e31}, "too large"),
        ({"sigma": np.zeros((12, 12))}, "one image over and over"),
        ({"sigma": np.ones((12, 12), dtype=object)}, "cannot be read"),
        ({"sigma": np.eye(13)}, r"\(13, 13\); extractor regions needs"),
        ({"mu": np.array(["1"] * 12)}, "cannot be read"),
        ({"mu": np.full(12, 1j)}, "cannot be read"),
        ({"mu": np.zeros(48), "sigma": np.eye(48)}, r"\(48,\) and .*; extractor regions needs \(12,\)"),
        ({}, "cannot be read"),
    ]
    for changed, said in impossible:
        np.savez(tmp_path / "odd.npz", **{"mu": np.zeros(12), "sigma": np.eye(12), **changed})
        if not changed:
            (tmp_path / "odd.npz").write_text("no archive")
        with pytest.raises(ElfattError, match=said) as error:
            build(tmp_path / "odd.npz", tmp_path)
        assert "odd.npz" in str(error.value) and "\n" not in str(error.value)


def test_renders_have_the_classes_of_the_prompts(tmp_path: Path) -> None:
    from elfatt_sd.toy.renderer import CLASSES, class_labels

    chosen = [5, 1300, 5, 900]
    labels, geometry = scenes(tuple(chosen[place % 4] for place in range(10)))
    assert torch.equal(labels, class_labels([CLASSES[chosen[place % 4]] for place in range(10)]))
    assert len({tuple(row) for row in geometry.tolist()}) == 10
    once, again = (np.stack([*renders(10, chosen).load(range(10))]) for _ in range(2))  # type: ignore[arg-type]
    assert (once.shape, once.dtype) == ((10, 256, 256, 3), np.uint8) and np.array_equal(once, again)
    found = build("toy", tmp_path, count=6, classes=chosen)
    assert (found.description["count"], found.metric_suffix) == (6, "")
