"""Reference images on their way into the network: modes, sizes, and those that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.runs import FILES, build, encoded, expected_statistics, flat, photo, regions

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation import extraction, reference
from elfatt_sd.evaluation.extraction import Preprocessing, SourceImages, extract
from elfatt_sd.evaluation.sources import decode, open_source


def test_resize_is_shorter_side_and_centre() -> None:
    wide = Image.new("RGB", (60, 20), "red")
    wide.paste("blue", (20, 0, 40, 20))
    assert set(map(tuple, Preprocessing(10, "crop", "box")(wide).reshape(-1, 3).tolist())) == {(0, 0, 255)}
    assert Preprocessing(10, "stretch")(wide).shape == (10, 10, 3)
    assert Preprocessing()(wide).shape == (20, 60, 3)
    for wrong in ({"size": 8}, {"resize": "crop"}, {"size": 8, "resize": "fit"}, {"filter": "mitchell"}):
        with pytest.raises(ElfattError, match="accepted"):
            Preprocessing(**wrong)  # type: ignore[arg-type]


def test_modes_of_pictures() -> None:
    grey = Image.new("L", (4, 4), 200)
    assert decode(encoded(grey)).getpixel((0, 0)) == (200, 200, 200)
    red = Image.new("RGB", (4, 4), (255, 0, 0))
    assert decode(encoded(red.quantize(4), "PNG")).getpixel((0, 0)) == (255, 0, 0)
    cmyk = decode(encoded(red.convert("CMYK"), quality=100))
    assert np.abs(np.array(cmyk, dtype=int)[0, 0] - (255, 0, 0)).max() < 12
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert decode(encoded(clear, "PNG")).getpixel((0, 0)) == (255, 255, 255)


def test_pictures_are_turned_upright() -> None:
    image = Image.new("RGB", (8, 4), "white")
    exif = image.getexif()
    exif[0x0112] = 6  # rotate by a quarter
    assert decode(encoded(image, exif=exif)).size == (4, 8)


def test_unreadable_pictures_are_named_and_counted(tmp_path: Path) -> None:
    source = flat(tmp_path)
    (source / "ILSVRC2012_val_00000002.JPEG").write_bytes(FILES["ILSVRC2012_val_00000002.JPEG"][:200])
    (source / "ILSVRC2012_val_00000005.JPEG").write_bytes(b"")
    with pytest.raises(ElfattError, match=r"2 images cannot be read, first ILSVRC2012_val_00000002.JPEG") as told:
        build(source, tmp_path / "cache")
    (listed,) = (tmp_path / "cache").glob("*/reference.json")
    assert str(told.value).endswith(
        f", all in {listed}; replace what cannot be read, or give --allow-count to go on with the other 10, which the "
        "metric's name will then say."
    )
    assert [line.split()[0][-10:] for line in json.loads(listed.read_text())["unreadable"]] == [
        "00002.JPEG",
        "00005.JPEG",
    ]
    found = build(source, tmp_path / "cache", allow_count=True)
    assert (found.count, found.metric_suffix) == (10, " (10 reference images)")
    assert [line.split()[0][-10:] for line in found.unreadable] == ["00002.JPEG", "00005.JPEG"]
    assert found.unreadable[1].endswith("(the file is empty)")
    left = {name: content for name, content in FILES.items() if name[-7:] not in ("02.JPEG", "05.JPEG")}
    torch.testing.assert_close(found.statistics.mean, expected_statistics(left).mean, rtol=1e-6, atol=1e-7)


def test_unreadable_pictures_have_plain_reasons(tmp_path: Path) -> None:
    source = flat(tmp_path)
    (source / "a.JPEG").write_bytes(b"rubbish")
    (source / "b.JPEG").symlink_to(tmp_path / "nowhere")
    (source / "c.JPEG").symlink_to(source / "c.JPEG")
    rubbish, lost, looping = build(source, tmp_path / "cache", allow_count=True).unreadable
    assert rubbish == "a.JPEG (no image of a known kind)"
    assert "No such file" in lost
    assert "c.JPEG" in looping


def test_pictures_of_different_sizes_need_no_resizing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for number, size in enumerate(((16, 24), (40, 16), (16, 24))):
        (tmp_path / "a" / f"{number}.png").write_bytes(encoded(photo(number, size), "PNG"))
    assert build(tmp_path / "a", tmp_path / "cache", expected=3).count == 3


def test_progress_is_told_once_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it is of and the time left; what was there before does not count as speed."""
    clock, lines = [0.0], list[str]()
    monkeypatch.setattr("elfatt_sd.progress.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(extraction, "CHUNK", 4)
    monkeypatch.setattr(extraction, "BATCH", 1)
    progress, extractor, slow = extraction.every_minute(lines.append), regions(), regions()
    pictures = SourceImages(open_source(flat(tmp_path)), Preprocessing())
    slow.network.register_forward_hook(lambda *_: clock.append(clock.pop() + 20))
    extract(pictures, slow, tmp_path / "rows", progress=progress)
    assert lines == [
        "measuring: regions, 3 of 12 images done, about 0:03:00 left",
        "measuring: regions, 6 of 12 images done, about 0:02:00 left",
        "measuring: regions, 9 of 12 images done, about 0:01:00 left",
        "measuring: regions, 12 of 12 images done, about 0:00:00 left",
    ]
    lines.clear()
    progress = extraction.every_minute(lines.append)
    (tmp_path / "rows" / "chunk-00002.npz").unlink()
    extract(pictures, slow, tmp_path / "rows", progress=progress)
    assert lines == ["measuring: regions, 11 of 12 images done, about 0:00:20 left"]
    lines.clear()
    extractor.network.register_forward_hook(lambda *_: clock.append(clock.pop() + 200))
    build(tmp_path / "flat", tmp_path, extractor, progress=progress)
    assert lines[0].startswith("measuring: reference, regions, ")


def test_sample_is_evenly_spaced_over_all_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "CHUNK", 5)
    monkeypatch.setattr(reference, "KERNEL_SAMPLE", 4)
    found = build(flat(tmp_path), tmp_path / "cache")
    extractor = regions()
    names = sorted(FILES)
    rows = [
        extractor(torch.from_numpy(np.array(decode(FILES[names[i]]))).permute(2, 0, 1)[None])[0] for i in (0, 3, 6, 9)
    ]
    assert found.sample is not None
    np.testing.assert_allclose(found.sample, torch.stack(rows).numpy(), rtol=1e-6)
