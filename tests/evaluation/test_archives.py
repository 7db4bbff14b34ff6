"""Odd archives: what cannot be read as it stands is refused or named, and nothing is missed in silence."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from elfatt_sd.config import ElfattError
from elfatt_sd.evaluation import entries, extraction, sources
from elfatt_sd.evaluation.extraction import Preprocessing, SourceImages
from elfatt_sd.evaluation.sources import open_source


def png(side: int = 4) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), "red").save(buffer, "PNG")
    return buffer.getvalue()


def tar(path: Path, **members: bytes) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name.replace("_", "."))
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def zipped(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name.replace("_", "."), content)
    return path


def refused(source: Path | str, says: str) -> None:
    with pytest.raises(ElfattError, match=says):
        open_source(source)


def test_classes_of_any_bytes(tmp_path: Path) -> None:
    path = tar(
        tmp_path / "a.tar", a_png=png(), a_cls=b"\xff", b_PNG=png(), b_CLS=b"7\n", c_png=png(), c_cls=b"1" * 5000
    )
    assert [entry.group for entry in open_source(path).entries] == ["\\xff", "7", ""]


def test_archives_that_go_on_after_their_end(tmp_path: Path) -> None:
    whole = tar(tmp_path / "a.tar", a_png=png(), b_png=png())
    content = whole.read_bytes()
    (tmp_path / "joined.tar").write_bytes(content * 2)
    refused(tmp_path / "joined.tar", "goes on after its end at byte 2048: .* joined")
    second = content.index(b"b.png")
    (tmp_path / "damaged.tar").write_bytes(content[: second + 5] + b"!" + content[second + 6 :])
    refused(tmp_path / "damaged.tar", "goes on after its end at byte 1024: it is damaged")
    assert len(open_source(whole).entries) == 2


def test_an_archive_that_was_cut_off_between_two_members(tmp_path: Path) -> None:
    content = tar(tmp_path / "a.tar", a_png=png(), b_png=png()).read_bytes()
    (tmp_path / "cut.tar").write_bytes(content[: content.index(b"b.png")])
    refused(tmp_path / "cut.tar", r"cut\.tar has no mark of its end at byte 1024: it was cut off")


def test_sparse_members_are_left_out(tmp_path: Path) -> None:
    path = tar(tmp_path / "a.tar", a_png=png())
    with tarfile.open(path, "a") as archive:
        info = tarfile.TarInfo("b.png")
        info.type = tarfile.GNUTYPE_SPARSE
        archive.addfile(info)
    source = open_source(path)
    assert ([entry.name for entry in source.entries], source.left_out) == (["a.png"], ["b.png"])


def test_zips_with_names_that_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("\xe9.png", png())
    path.write_bytes(path.read_bytes().replace("\xe9".encode(), b"\xff\xfe"))
    refused(path, "cannot be read .*utf-8")


def test_a_zip_that_unpacks_to_more_than_memory_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = zipped(tmp_path / "a.zip", a_png=png(), b_png=bytes(10_000), c_bin=bytes(10_000_000))
    monkeypatch.setattr(entries, "LARGEST", 5000)
    source = open_source(path)
    assert source.left_out == ["c.bin"]
    assert source.read(source.entries[0]) == png()
    with pytest.raises(OSError, match="GiB; accepted: at most 0 GiB an image"):
        source.read(source.entries[1])


def test_files_with_holes_are_not_read(tmp_path: Path) -> None:
    """They take no disk, and more memory than there is."""
    (tmp_path / "a.png").write_bytes(png())
    with (tmp_path / "b.png").open("wb") as file:
        file.truncate(1 << 40)
    first, second = (SourceImages(open_source(tmp_path), Preprocessing()).load(start, start + 1) for start in (0, 1))
    assert np.asarray(next(first)).shape == (4, 4, 3)
    assert next(second) == "b.png (1024 GiB; accepted: at most 1 GiB an image)"


def test_members_of_one_name_are_images_of_their_own(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("a.png", png(4))
        archive.writestr("a.png", png(8))
    (tmp_path / "a.tar").write_bytes(tar(tmp_path / "b.tar", a_png=png(4), A_png=png(8)).read_bytes())
    for name in ("a.zip", "a.tar"):
        images = SourceImages(open_source(tmp_path / name), Preprocessing()).load(0, 2)
        assert sorted(np.asarray(image).shape[0] for image in images) == [4, 8]


def with_header(path: Path, **header: str) -> Path:
    """Write an archive whose first member has an odd extended header."""
    content = png()
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for name in ("a.png", "b.png"):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            info.pax_headers = (
                {key.replace("_", "."): value for key, value in header.items()} if name == "a.png" else {}
            )
            archive.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize(
    "header", [{"GNU_sparse_size": "x"}, {"GNU_sparse_map": "1,x"}, {"GNU_sparse_realsize": "x"}, {"size": "9" * 30}]
)
def test_odd_headers_are_told(tmp_path: Path, header: dict[str, str]) -> None:
    refused(with_header(tmp_path / "a.tar", **header), r"a\.tar cannot be read \(.*\); accepted: an uncompressed \.tar")


def test_a_zip_of_a_later_version_is_told(tmp_path: Path) -> None:
    content = bytearray(zipped(tmp_path / "a.zip", a_png=png()).read_bytes())
    content[content.index(b"PK\1\2") + 6] = 200
    (tmp_path / "b.zip").write_bytes(content)
    refused(tmp_path / "b.zip", "zip file version 20.0")


def test_damaged_pages_of_a_table_are_told(tmp_path: Path) -> None:
    """Labels are read before any image, each image when it is wanted."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(
        pa.table({"image": [png()], "label": ["name" * 9]}), path, compression="none", use_dictionary=False
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

    source = open_source(table("mask.parquet", mask=[b"no image"], image=[png()]))
    assert source.read(source.entries[0]) == png()
    refused(table("two.parquet", before=[png()], after=[png()]), "has bytes in before, after; accepted: one column")


def test_patterns_and_links_without_end(tmp_path: Path) -> None:
    refused("val-{0..999999999}.tar", "names 1000000000 files; accepted: at most 100000")
    place = tmp_path / "top"
    place.mkdir()
    for _ in range(40):  # 2^40 paths
        (place / "a").mkdir()
        os.symlink("a", place / "b")
        place = place / "a"
    (place / "1.png").write_bytes(png())
    refused(tmp_path / "top", "links lead to .* by more than 64 paths")
    assert sources._MOST_PATHS == 64


def test_large_pictures_are_decoded_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As four threads would hold a dozen of them otherwise, each of several gigabytes."""
    for index in range(6):
        (tmp_path / f"{index}.png").write_bytes(png(8 if index % 2 else 64))
    monkeypatch.setattr(extraction, "LARGE", 100)
    held: list[int] = []
    decode = extraction.decode

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
