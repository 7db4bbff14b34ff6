"""Every kind of source of reference images, what is taken from it, and what is said of the rest."""

from __future__ import annotations

import errno
import os
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from reference_files import (
    COUNT,
    FILES,
    KINDS,
    WNIDS,
    build,
    classes,
    encoded,
    expected_statistics,
    flat,
    linked_classes,
    official_tar,
    parquet,
    shards,
    write_tar,
    zipped,
)

from elfatt_sd.config import ElfattError
from elfatt_sd.evaluation import extraction, sources
from elfatt_sd.evaluation.decoding import decode
from elfatt_sd.evaluation.sources import open_source


@pytest.mark.parametrize("kind", KINDS)
def test_every_source_gives_the_same_statistics(kind: Callable[[Path], Path], tmp_path: Path) -> None:
    found = build(kind(tmp_path), tmp_path / "cache")
    expected = expected_statistics()
    assert (found.count, found.unreadable, found.metric_suffix) == (COUNT, [], " (12 reference images)")
    torch.testing.assert_close(found.statistics.mean, expected.mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found.statistics.covariance, expected.covariance, rtol=1e-5, atol=1e-8)
    assert found.sample is not None
    assert found.sample.shape == (COUNT, 12)


@pytest.mark.parametrize("kind", [classes, linked_classes, shards, parquet])
def test_first_pictures_of_each_class(kind: Callable[[Path], Path], tmp_path: Path) -> None:
    source = kind(tmp_path)
    kept = open_source(source, per_class=1).entries
    assert len(kept) == len({entry.group for entry in kept}) == 3
    assert build(source, tmp_path / "cache", per_class=1, expected=3).count == 3


@pytest.mark.parametrize("kind", [flat, official_tar, zipped])
def test_a_flat_source_has_no_classes(kind: Callable[[Path], Path], tmp_path: Path) -> None:
    """Not even where all pictures lie under one folder of an archive."""
    with pytest.raises(ElfattError, match=r"no classes, which per_class=5 needs; give one folder per class"):
        open_source(kind(tmp_path), per_class=5)


def test_pictures_of_a_tar_are_taken_by_name(tmp_path: Path) -> None:
    """Tar keeps files in the order in which the disk lists them."""
    members = {f"{WNIDS[place % 3]}/{name}": content for place, (name, content) in enumerate(FILES.items())}
    source = write_tar(tmp_path / "val.tar", dict(reversed(members.items())))
    kept = [entry.name for entry in open_source(source, per_class=2).entries]
    assert kept == [name for wnid in WNIDS for name in [name for name in members if name.startswith(wnid)][:2]]


def test_braces_name_shards() -> None:
    cases = {
        "a.tar": ["a.tar"],
        "{a,b}-{0..2}.tar": [f"{letter}-{number}.tar" for letter in "ab" for number in range(3)],
        "{08..10}": ["08", "09", "10"],
        "{9..10}": ["9", "10"],
        "{2..0}": ["0", "1", "2"],
        "{x}": ["{x}"],
    }
    for pattern, expected in cases.items():
        assert sources._expanded(pattern) == expected


def test_missing_shards_are_named(tmp_path: Path) -> None:
    source = shards(tmp_path)
    with pytest.raises(ElfattError, match=r"lacks 1 of 3 files: .*/val-000002\.tar\.$"):
        open_source(source / "val-{000000..000002}.tar")
    with pytest.raises(ElfattError, match=r"lacks 8 of 10 files: .*2\.tar, .*3\.tar, .*4\.tar, \.\.\.\.$"):
        open_source(source / "val-{000000..000009}.tar")
    with pytest.raises(ElfattError, match=r"does not exist; accepted: .*val-\{000\.\.049\}\.tar"):
        open_source(source / "train-{000000..000002}.tar")


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
    assert (found := build(source, tmp_path / "cache")).count == COUNT
    assert found.unreadable == []


def test_bad_sources(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "val.rar").write_bytes(b"")
    (tmp_path / "bad.tar").write_bytes(b"x" * 2000)
    (tmp_path / "bad.zip").write_bytes(b"x" * 2000)
    (tmp_path / "bad.parquet").write_bytes(b"x" * 2000)
    (tmp_path / "zips").mkdir()
    zipped(tmp_path / "zips").rename(tmp_path / "zips" / "a.zip")
    (tmp_path / "zips" / "b.zip").write_bytes(b"x" * 2000)
    cases = (
        ("", "missing"),
        ("nowhere", "does not exist"),
        ("nowhere-*.tar", "does not exist"),
        ("empty", "holds no image"),
        ("val.rar", "of kind .rar"),
        ("bad.tar", "cannot be read"),
        ("bad.zip", "cannot be read"),
        ("zips/*.zip", "zips/b.zip cannot be read"),
        ("bad.parquet", "cannot be read"),
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
    folder, tar, archive = tmp_path / "folder", tmp_path / "all.tar", tmp_path / "all.zip"
    for name, content in mixed().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    with tarfile.open(tar, "w") as made:
        made.add(folder, ".", recursive=False)
        for name in mixed():
            made.add(folder / name, name)
        link = tarfile.TarInfo("b/linked.png")
        link.type, link.linkname = tarfile.LNKTYPE, "b/map.pgm"
        made.addfile(link)
    with zipfile.ZipFile(archive, "w") as packed:
        for name, content in mixed().items():
            packed.writestr(name, content)
    for source, links in ((folder, []), (tar, ["b/linked.png"]), (archive, [])):
        found = open_source(source)
        assert [entry.name for entry in found.entries] == IMAGES
        assert list(found.left_out) == [*LEFT_OUT, *links]
    with pytest.raises(ElfattError, match=r"has 5 images \(2 left out \(hidden, or no image\): b/notes.txt, b/weights"):
        build(folder, tmp_path / "cache", expected=7)
    built = build(folder, tmp_path / "cache", expected=5, allow_count=True)
    assert built.description["left_out"] == "2 left out (hidden, or no image): b/notes.txt, b/weights.bin"
    assert built.unreadable == ["photo.avif (no image of a known kind)"]


@pytest.mark.parametrize(
    "hidden", [".ipynb_checkpoints", ".thumbnails", ".cache/huggingface", "@eaDir", "#recycle", "lost+found"]
)
@pytest.mark.parametrize("packed", ["", "tar", "zip"])
def test_what_is_hidden_is_no_image_and_no_class(tmp_path: Path, hidden: str, packed: str) -> None:
    content = encoded(Image.new("RGB", (8, 8)), "PNG")
    kept = [f"{group}/{number}.png" for group in ("cat", "dog") for number in range(2)]
    litter = [f"{hidden}/0.png", f"cat/{hidden}/0-checkpoint.png", "dog/.partial.png"]
    for name in (*kept, *litter):
        (tmp_path / "all" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "all" / name).write_bytes(content)
    source = tmp_path / "all"
    if packed:
        source = Path(shutil.make_archive(str(tmp_path / "packed"), packed, source))
    found = open_source(source, per_class=2)
    assert [Path(entry.name).as_posix() for entry in found.entries] == kept
    assert {entry.group for entry in found.entries} == {"cat", "dog"}
    place = hidden.split("/")[0]
    assert len(found.left_out) == 3 and sum(place in name for name in found.left_out) == 2
    assert sources.left_out_words(found.left_out).startswith("3 left out (hidden, or no image): ")


@pytest.mark.parametrize("pattern", ["", "val-*.tar", "*.tar"])
def test_a_hidden_shard_is_left_alone(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "one.png").write_bytes(encoded(Image.new("RGB", (8, 8)), "PNG"))
    with tarfile.open(tmp_path / "val-000.tar", "w") as made:
        made.add(tmp_path / "one.png", "one.png")
    for name in ("._val-000.tar", ".val-001.tar"):
        (tmp_path / name).write_bytes(b"rubbish")
    assert [entry.name for entry in open_source(tmp_path / pattern).entries] == ["one.png"]


def test_a_folder_of_shards_names_what_lies_beside(tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(encoded(Image.new("RGB", (8, 8)), "PNG"))
    (tmp_path / "index.json").write_text("{}")
    with tarfile.open(tmp_path / "val-000.tar", "w") as made:
        made.add(tmp_path / "one.png", "one.png")
    assert list(open_source(tmp_path).left_out) == ["one.png"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.bin").write_bytes(b"rubbish")
    with pytest.raises(ElfattError, match=r"holds no image \(1 left out .hidden, or no image.: a.bin\)"):
        open_source(tmp_path / "empty")


@pytest.mark.parametrize("name", ["a-{0..99999}{0..99999}.tar", "a-{a,b}{0..99999}.tar", "a-{0..99999999999}.tar"])
def test_braces_that_name_too_many_files_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ElfattError, match="accepted: at most 100000"):
        open_source(tmp_path / name)


def test_braces_of_no_number_that_files_have_are_a_name(tmp_path: Path) -> None:
    with pytest.raises(ElfattError, match="does not exist"):
        open_source(tmp_path / f"a-{{{'9' * 5000}..1}}.tar")
