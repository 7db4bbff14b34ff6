"""References from every kind of source, killed and resumed, with damaged and odd pictures."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import small_run
import torch
from extractors import regions
from PIL import Image

from elfatt_sd.config import ElfattError
from elfatt_sd.evaluation import extraction, reference, sources
from elfatt_sd.evaluation.extraction import Preprocessing, SourcePictures, extract
from elfatt_sd.evaluation.features import Extractor
from elfatt_sd.evaluation.reference import Reference, build_reference
from elfatt_sd.evaluation.renders import Renders
from elfatt_sd.evaluation.sources import decode, open_source
from elfatt_sd.evaluation.statistics import FeatureStatistics

COUNT = 12
WNIDS = ("n01440764", "n01443537", "n02012849")
ROOT = Path(__file__).parents[2]


def picture(seed: int, size: tuple[int, int] = (40, 32)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1] // 8, size[0] // 8, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


FILES = {f"ILSVRC2012_val_{number:08d}.JPEG": encoded(picture(number)) for number in range(1, COUNT + 1)}


def write_folder(folder: Path, *, by_class: bool = False) -> Path:
    for number, (name, content) in enumerate(FILES.items()):
        path = folder / WNIDS[number % 3] / name if by_class else folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def flat(folder: Path) -> Path:
    (folder / "flat").mkdir()
    (folder / "flat" / "notes.txt").write_text("no picture")
    return write_folder(folder / "flat")


def classes(folder: Path) -> Path:
    return write_folder(folder / "classes", by_class=True)


def official_tar(folder: Path) -> Path:
    return write_tar(folder / "ILSVRC2012_img_val.tar", FILES)


def zipped(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "val.zip", "w") as archive:
        archive.writestr("__MACOSX/._ILSVRC2012_val_00000001.JPEG", b"rubbish")
        for name, content in FILES.items():
            archive.writestr(f"val/{name}", content)
    return folder / "val.zip"


def shards(folder: Path) -> Path:
    items = list(FILES.items())
    (folder / "shards").mkdir()
    for number in range(2):
        members = {}
        for place, (_, content) in enumerate(items[6 * number : 6 * number + 6]):
            members |= {
                f"{number:02d}{place:04d}.jpg": content,
                f"{number:02d}{place:04d}.cls": str(place % 3).encode(),
            }
        write_tar(folder / "shards" / f"val-{number:06d}.tar", members)
    return folder / "shards"


def shard_pattern(folder: Path) -> Path:
    return shards(folder) / "val-*.tar"


def shard_braces(folder: Path) -> Path:
    return shards(folder) / "val-{000000..000001}.tar"


def linked_classes(folder: Path) -> Path:
    """Class folders and pictures that lie elsewhere, with links back and to nowhere."""
    source = write_folder(folder / "elsewhere", by_class=True)
    (folder / "linked").mkdir()
    for name in WNIDS[1:]:
        (folder / "linked" / name).symlink_to(source / name, target_is_directory=True)
    (folder / "linked" / WNIDS[0]).mkdir()
    for path in (source / WNIDS[0]).iterdir():
        (folder / "linked" / WNIDS[0] / path.name).symlink_to(path)
    (source / WNIDS[1] / "back").symlink_to(folder / "linked")
    (folder / "linked" / "self").symlink_to(folder / "linked")
    return folder / "linked"


def parquet(folder: Path) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    rows = [{"bytes": content, "path": name} for name, content in FILES.items()]
    table = pyarrow.table({"image": rows, "label": [number % 3 for number in range(COUNT)]})
    import pyarrow.parquet

    pyarrow.parquet.write_table(table, folder / "val.parquet", row_group_size=5)
    return folder / "val.parquet"


KINDS = (flat, classes, linked_classes, official_tar, zipped, shards, shard_pattern, shard_braces, parquet)


def build(source: Path | str, cache: Path, **options: Any) -> Reference:
    return build_reference(source, regions(), cache_dir=cache, **{"expected": COUNT, "batch_size": 5, **options})


def expected_statistics(contents: dict[str, bytes] = FILES) -> FeatureStatistics:
    extractor, found = regions(), FeatureStatistics(12)
    for content in contents.values():
        pixels = np.array(Image.open(io.BytesIO(content)).convert("RGB"))
        found.update(extractor(torch.from_numpy(pixels).permute(2, 0, 1)[None]))
    return found


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


def test_cache_is_used_until_files_or_preprocessing_change(tmp_path: Path) -> None:
    source, cache = flat(tmp_path), tmp_path / "cache"

    def calls(**options: Any) -> int:
        extractor = regions()
        build_reference(source, extractor, cache_dir=cache, expected=COUNT, **options)
        return int(extractor.network.calls)  # type: ignore[arg-type]

    assert calls() == COUNT
    assert calls() == 0
    assert calls(preprocessing=Preprocessing(16, "crop")) == COUNT
    assert calls(preprocessing=Preprocessing(16, "crop", "lanczos")) == COUNT
    changed = source / "ILSVRC2012_val_00000003.JPEG"
    changed.write_bytes(encoded(picture(99)))
    os.utime(changed, ns=(1, 1))
    assert calls() == COUNT
    assert not list(cache.rglob("*.part"))
    assert not list(cache.rglob("chunk-*"))


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
    deep = Image.fromarray(np.full((4, 4), 200 * 256, dtype=np.uint16))
    assert decode(encoded(deep, "PNG")).getpixel((0, 0)) == (200, 200, 200)
    assert decode(encoded(deep.convert("I"), "TIFF")).getpixel((0, 0)) == (200, 200, 200)


def test_pictures_are_turned_upright() -> None:
    image = Image.new("RGB", (8, 4), "white")
    exif = image.getexif()
    exif[0x0112] = 6  # rotate by a quarter
    assert decode(encoded(image, exif=exif)).size == (4, 8)


def test_unreadable_pictures_are_named_and_counted(tmp_path: Path) -> None:
    source = flat(tmp_path)
    (source / "ILSVRC2012_val_00000002.JPEG").write_bytes(FILES["ILSVRC2012_val_00000002.JPEG"][:200])
    (source / "ILSVRC2012_val_00000005.JPEG").write_bytes(b"")
    with pytest.raises(ElfattError, match=r"2 pictures cannot be read, first ILSVRC2012_val_00000002.JPEG") as told:
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
    assert rubbish == "a.JPEG (no picture of a known kind)"
    assert "No such file" in lost
    assert "c.JPEG" in looping


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    source = flat(tmp_path)
    os.mkfifo(source / "a.JPEG")
    (pipe,) = build(source, tmp_path / "cache", allow_count=True).unreadable
    assert pipe == "a.JPEG (it is no plain file)"


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


def test_pictures_of_different_sizes_need_no_resizing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for number, size in enumerate(((16, 24), (40, 16), (16, 24))):
        (tmp_path / "a" / f"{number}.png").write_bytes(encoded(picture(number, size), "PNG"))
    assert build(tmp_path / "a", tmp_path / "cache", expected=3).count == 3


def test_another_count_must_be_allowed_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = flat(tmp_path)
    with pytest.raises(
        ElfattError, match=r"12 pictures \(1 file is left out as no image: notes.txt\); accepted are 50000"
    ):
        build(source, tmp_path / "cache", expected=50_000)
    assert not (tmp_path / "cache").exists()
    suffixes = [build(source, tmp_path / "cache", expected=50_000, allow_count=True).metric_suffix]
    suffixes += [build(source, tmp_path / "cache").metric_suffix]  # a protocol that names the number tells it, too
    monkeypatch.setattr(reference, "FULL_COUNT", COUNT)
    suffixes += [build(source, tmp_path / "cache").metric_suffix]
    assert suffixes == [" (12 reference images)"] * 2 + [""]


def test_progress_is_told_once_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it is of and the time left; what was there before does not count as speed."""
    clock, lines = [0.0], list[str]()
    monkeypatch.setattr("elfatt_sd.progress.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(extraction, "CHUNK", 4)
    progress, extractor, slow = extraction.every_minute(lines.append), regions(), regions()
    pictures = SourcePictures(open_source(flat(tmp_path)), Preprocessing())
    slow.network.register_forward_hook(lambda *_: clock.append(clock.pop() + 20))
    extract(pictures, slow, tmp_path / "rows", batch_size=1, progress=progress)
    assert lines == [
        "measuring: regions, 3 of 12 pictures done, about 0:03:00 left",
        "measuring: regions, 6 of 12 pictures done, about 0:02:00 left",
        "measuring: regions, 9 of 12 pictures done, about 0:01:00 left",
        "measuring: regions, 12 of 12 pictures done, about 0:00:00 left",
    ]
    lines.clear()
    progress = extraction.every_minute(lines.append)
    (tmp_path / "rows" / "chunk-00002.npz").unlink()
    extract(pictures, slow, tmp_path / "rows", batch_size=1, progress=progress)
    assert lines == ["measuring: regions, 11 of 12 pictures done, about 0:00:20 left"]
    lines.clear()
    extractor.network.register_forward_hook(lambda *_: clock.append(clock.pop() + 200))
    build_reference(tmp_path / "flat", extractor, cache_dir=tmp_path, expected=COUNT, batch_size=6, progress=progress)
    assert lines[0].startswith("measuring: reference, regions, ")


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def test_a_killed_computation_goes_on_and_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "CHUNK", 5)
    source = flat(tmp_path)
    whole = build(source, tmp_path / "whole", batch_size=2)
    for limit in (1, 7, 4):  # pictures until each kill

        def kill(_: str, done: int, __: int, begun: list[int] = [], limit: int = limit) -> None:  # noqa: B006
            begun.append(done)
            if len(begun) > limit / 2:
                begun.clear()
                raise Killed

        with pytest.raises(Killed):
            build(source, tmp_path / "cache", batch_size=2, progress=kill)
    assert list((tmp_path / "cache").rglob("chunk-*.npz"))
    extractor = regions()
    resumed = build_reference(source, extractor, cache_dir=tmp_path / "cache", expected=COUNT, batch_size=2)
    assert 0 < int(extractor.network.calls) < COUNT  # type: ignore[arg-type]
    assert torch.equal(resumed.statistics.mean, whole.statistics.mean)
    assert torch.equal(resumed.statistics.covariance, whole.statistics.covariance)
    assert resumed.sample is not None
    assert np.array_equal(resumed.sample, whole.sample)  # type: ignore[arg-type]
    assert resumed.identity == whole.identity


def test_two_runs_share_one_reference(tmp_path: Path) -> None:
    source = flat(tmp_path)
    extractors = [regions(), regions()]

    def work(extractor: Extractor) -> Reference:
        return build_reference(source, extractor, cache_dir=tmp_path / "cache", expected=COUNT)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(work, extractors))
    assert sorted(int(extractor.network.calls) for extractor in extractors) == [0, COUNT]  # type: ignore[arg-type]
    assert torch.equal(found[0].statistics.mean, found[1].statistics.mean)


def test_processes_share_the_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "CHUNK", 5)
    pictures = SourcePictures(open_source(flat(tmp_path)), Preprocessing())
    alone = extract(pictures, regions(), tmp_path / "alone", batch_size=2)
    calls = []
    for rank in (1, 0):  # in a launch they run at once, and wait for each other at the end
        state = SimpleNamespace(num_processes=2, process_index=rank, wait_for_everyone=lambda: None)
        monkeypatch.setattr(extraction, "process_state", lambda state=state: state)
        extractor = regions()
        shared = extract(pictures, extractor, tmp_path / "shared", batch_size=2)
        calls.append(int(extractor.network.calls))  # type: ignore[arg-type]
    assert calls == [5, 7]
    assert [path.read_bytes() for path in shared.chunks] == [path.read_bytes() for path in alone.chunks]


LAUNCHED = """
import json, os, sys
from pathlib import Path
from extractors import regions
from elfatt_sd.evaluation import extraction
from elfatt_sd.evaluation.processes import leave_processes, process_state
from elfatt_sd.evaluation.reference import build_reference

process_state("cpu")
extraction.CHUNK = 5
place, rank = Path(sys.argv[1]), os.environ["RANK"]

def attempt(source, cache, extractor=None):
    try:
        found = build_reference(place / source, extractor or regions(), cache_dir=place / cache, expected=12)
        return found.statistics.mean.tolist()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def broken(*_):
    raise RuntimeError("the cable is out")

half = regions()
if rank == "1":
    half.network.register_forward_hook(broken)
said = {
    "apart": attempt("flat", "apart" + rank),
    "half finished": attempt("flat", "half" + rank),
    "missing": attempt("copy" + rank * 2, "shared"),
    "other times": attempt("copy" + rank, "shared"),
    "no folder": attempt("flat", "flat/notes.txt"),
    "one fails": attempt("flat", "shared", half),
    "shared": attempt("flat", "shared"),
    "finished": attempt("flat", "shared"),
    "left": sorted(path.name for path in place.glob("*/.seen-*")),
}
(place / f"said{rank}.json").write_text(json.dumps(said))
leave_processes()
"""


def test_processes_of_a_launch_agree_before_they_work(tmp_path: Path) -> None:
    """Two processes, as on two machines: with caches and pictures of their own, and with shared ones."""
    source = flat(tmp_path)
    for rank in range(2):
        shutil.copytree(source, tmp_path / f"copy{rank}", copy_function=shutil.copyfile)  # with times of their own
    shutil.copytree(source, tmp_path / "copy00")
    alone = build(source, tmp_path / "half0")  # only the first machine has it finished
    script = tmp_path / "start.py"
    script.write_text(LAUNCHED)
    launch = [*small_run.TWO_PROCESSES, str(script), str(tmp_path)]
    paths = os.pathsep.join((str(ROOT), str(Path(__file__).parent)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = (json.loads((tmp_path / f"said{rank}.json").read_text()) for rank in range(2))
    for case, place in (("apart", "apart"), ("half finished", "half")):
        assert first[case] == second[case]
        assert f"cache {tmp_path / place}0 of process 0" in first[case]
        assert f"is not that of process 1 ({tmp_path / place}1 on " in first[case]
        assert "; set ELFATT_SD_CACHE to a folder that all machines share." in first[case]
    assert first["missing"] == second["missing"]
    assert "copy11 does not exist" in first["missing"]
    for said in (first, second):
        assert "is not the same in process 1 as in process 0 (names, sizes or times" in said["other times"]
        assert "cannot be written" in said["no folder"]
        assert "ELFATT_SD_CACHE" in said["no folder"]
        for case in ("shared", "finished"):
            torch.testing.assert_close(torch.tensor(said[case]), alone.statistics.mean.float(), rtol=1e-6, atol=1e-7)
        assert said["left"] == []
    assert (first["one fails"], second["one fails"]) == (
        "ElfattError: the cable is out",
        "RuntimeError: the cable is out",
    )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # numpy leaves a damaged zip open
@pytest.mark.parametrize("content", [b"", b"half", b"{}", b"other"])
@pytest.mark.parametrize("name", ["statistics.npz", "sample.npy", "reference.json"])
def test_a_damaged_cache_is_made_anew(tmp_path: Path, name: str, content: bytes) -> None:
    source, cache = flat(tmp_path), tmp_path / "cache"
    before = build(source, cache)
    (folder,) = cache.iterdir()
    whole = (folder / name).read_bytes()
    other = tmp_path / "other.npy"
    np.save(other, np.zeros((3, 3), dtype=np.float32))
    given = {b"half": whole[: len(whole) // 2], b"other": other.read_bytes()}
    (folder / name).write_bytes(given.get(content, content))
    again = build(source, cache)
    assert torch.equal(before.statistics.covariance, again.statistics.covariance)
    assert (folder / name).read_bytes() == whole


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_chunk_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "CHUNK", 5)
    pictures = SourcePictures(open_source(flat(tmp_path)), Preprocessing())
    before = [features for features, _ in extract(pictures, regions(), tmp_path / "c", batch_size=2)]
    for number, content in enumerate((b"", b"PK\x03\x04 no zip")):
        (tmp_path / "c" / f"chunk-{number:05d}.npz").write_bytes(content)
    after = [features for features, _ in extract(pictures, regions(), tmp_path / "c", batch_size=2)]
    assert all(np.array_equal(*pair) for pair in zip(before, after, strict=True))


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


def test_statistics_of_another_tool(tmp_path: Path) -> None:
    expected = expected_statistics()
    np.savez(tmp_path / "other.npz", mu=expected.mean, sigma=expected.covariance)
    found = build(tmp_path / "other.npz", tmp_path)
    assert (found.sample, found.count, found.metric_suffix) == (None, None, " (statistics of other.npz)")
    torch.testing.assert_close(found.statistics.covariance, expected.covariance)
    expected.save(tmp_path / "ours.npz")
    assert build(tmp_path / "ours.npz", tmp_path).metric_suffix == " (12 reference images)"
    with pytest.raises(ElfattError, match="accepted are 50000"):
        build(tmp_path / "ours.npz", tmp_path, expected=50_000)
    np.savez(tmp_path / "wide.npz", mu=np.zeros(2048), sigma=np.eye(2048))
    with pytest.raises(ElfattError, match="2048 features; extractor regions needs 12"):
        build(tmp_path / "wide.npz", tmp_path)


def test_renders_have_the_classes_of_the_prompts(tmp_path: Path) -> None:
    from elfatt_sd.toy.renderer import ATTRIBUTES, CLASSES

    chosen = [5, 1300, 5, 900]
    renders = Renders(10, chosen)
    labels, geometry = renders.scenes
    names = [
        tuple(values[place] for values, place in zip(ATTRIBUTES.values(), row, strict=True)) for row in labels.tolist()
    ]
    assert names == [CLASSES[chosen[place % 4]] for place in range(10)]
    assert len({tuple(row) for row in geometry.tolist()}) == 10
    assert torch.equal(Renders(10, chosen).scenes[1], geometry)
    images = [image for image in renders.load(0, 2) if not isinstance(image, str)]
    assert [(image.shape, image.dtype) for image in images] == [((256, 256, 3), np.uint8)] * 2
    for source, count in (("renders:6", 6), ("toy", COUNT)):
        found = build(source, tmp_path, expected=count, classes=chosen)
        assert (found.count, found.metric_suffix) == (count, "")
    with pytest.raises(ElfattError, match="class 9999"):
        Renders(2, [9999])
    for wrong in ("renders:0", "renders:x", "renders:1"):
        with pytest.raises(ElfattError, match="renders:COUNT"):
            build(wrong, tmp_path)


def test_renders_are_known_before_they_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    from elfatt_sd.toy import renderer

    expected = Renders(10, [5, 1300]).fingerprint
    monkeypatch.setattr(renderer, "sample_parameters", None)
    assert Renders(10, [5, 1300]).fingerprint == expected


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
        ("empty", "holds no picture"),
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
    with pytest.raises(ElfattError, match=r"0 readable pictures; accepted are 2 or more; first: 0.png"):
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
    with pytest.raises(ElfattError, match=r"has 5 pictures \(2 files are left out as no image: b/notes.txt, b/weights"):
        build(folder, tmp_path / "cache", expected=7)
    built = build(folder, tmp_path / "cache", expected=5, allow_count=True)
    assert built.description["left_out"] == "2 files are left out as no image: b/notes.txt, b/weights.bin"
    assert built.unreadable == ["photo.avif (no picture of a known kind)"]


def test_a_folder_of_shards_names_what_lies_beside(tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(encoded(Image.new("RGB", (8, 8)), "PNG"))
    (tmp_path / "index.json").write_text("{}")
    with tarfile.open(tmp_path / "val-000.tar", "w") as made:
        made.add(tmp_path / "one.png", "one.png")
    assert list(open_source(tmp_path).left_out) == ["one.png"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.bin").write_bytes(b"rubbish")
    with pytest.raises(ElfattError, match=r"holds no picture \(1 file is left out as no image: a.bin\)"):
        open_source(tmp_path / "empty")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        *(
            ({"count": count}, "has count")
            for count in (0, 1, -3, 2.5, 1e30, float("nan"), float("inf"), "many", [2, 3])
        ),
        ({"count": None}, "cannot be read"),
        ({"sigma": np.diag([-1.0] + 11 * [1.0])}, "negative eigenvalue -1"),
        ({"sigma": np.triu(np.ones((12, 12)))}, "not symmetric"),
        ({"sigma": np.full((12, 12), np.nan)}, "NaN"),
        ({"sigma": np.ones((12, 12), dtype=object)}, "cannot be read"),
        ({"mu": np.array(["x"] * 12)}, "cannot be read"),
    ],
)
def test_impossible_statistics_are_refused(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    arrays = {"mu": np.zeros(12), "sigma": np.eye(12), "count": np.int64(COUNT)}
    np.savez(tmp_path / "odd.npz", **(arrays | changed))
    with pytest.raises(ElfattError, match=said) as error:
        build(tmp_path / "odd.npz", tmp_path)
    assert "odd.npz" in str(error.value) and "\n" not in str(error.value)


def test_a_single_array_is_no_statistics(tmp_path: Path) -> None:
    with open(tmp_path / "one.npz", "wb") as file:
        np.save(file, np.eye(12))
    with pytest.raises(ElfattError, match="holds a single array"):
        build(tmp_path / "one.npz", tmp_path)


def test_rounding_of_another_tool_is_forgiven(tmp_path: Path) -> None:
    expected = expected_statistics()
    sigma = expected.covariance.float().numpy()
    sigma[0, 1] *= 1 + 1e-6
    np.savez(tmp_path / "single.npz", mu=expected.mean.float(), sigma=sigma)
    found = build(tmp_path / "single.npz", tmp_path).statistics.covariance
    assert torch.equal(found, found.T)
    torch.testing.assert_close(found, expected.covariance, rtol=1e-5, atol=1e-6)
