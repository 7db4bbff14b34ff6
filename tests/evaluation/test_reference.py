"""The reference: one that is begun goes on, processes share it, and its cache is used as long as it holds."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import runs
from support.runs import PHOTOS, build, encoded, expected_statistics, flat, photo, regions

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation import extraction, processes, reference
from elfatt_sd.evaluation.extraction import SourceImages, extract, open_source
from elfatt_sd.evaluation.features import Extractor
from elfatt_sd.evaluation.protocols import Protocol
from elfatt_sd.evaluation.reference import Reference, Renders
from elfatt_sd.evaluation.run import Run


def test_cache_is_used_until_files_or_preprocessing_change(tmp_path: Path) -> None:
    source, cache = flat(tmp_path), tmp_path / "cache"

    def calls(**options: Any) -> int:
        extractor = regions()
        build(source, cache, extractor, **options)
        return int(extractor.network.calls)  # type: ignore[arg-type]

    assert calls() == PHOTOS
    assert calls() == 0
    assert calls(size=16, resize="crop") == PHOTOS
    assert calls(size=16, resize="crop", filter="lanczos") == PHOTOS
    changed = source / "ILSVRC2012_val_00000003.JPEG"
    changed.write_bytes(encoded(photo(99)))
    os.utime(changed, ns=(1, 1))
    assert calls() == PHOTOS
    assert not list(cache.rglob("*.part"))
    assert not list(cache.rglob("chunk-*"))


def test_another_count_must_be_allowed_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = flat(tmp_path)
    with pytest.raises(ElfattError, match="has 12 images; accepted are 50000, or give --allow-count"):
        build(source, tmp_path / "cache", count=50_000)
    assert not (tmp_path / "cache").exists()
    suffixes = [build(source, tmp_path / "cache", count=50_000, allow_count=True).metric_suffix]
    suffixes += [build(source, tmp_path / "cache").metric_suffix]  # a protocol that names the number tells it, too
    monkeypatch.setattr(reference, "FULL_COUNT", PHOTOS)
    suffixes += [build(source, tmp_path / "cache").metric_suffix]
    assert suffixes == [" (12 reference images)"] * 2 + [""]


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "CHUNK", 5)
    monkeypatch.setattr(extraction, "BATCH", 2)


def test_a_killed_computation_goes_on_and_gives_the_same_bits(tmp_path: Path, small_chunks: None) -> None:
    source = flat(tmp_path)
    whole = build(source, tmp_path / "whole")
    for limit in (1, 7, 4):  # pictures until each kill

        def kill(_: str, done: int, __: int, begun: list[int] = [], limit: int = limit) -> None:  # noqa: B006
            begun.append(done)
            if len(begun) > limit / 2:
                begun.clear()
                raise Killed

        with pytest.raises(Killed):
            build(source, tmp_path / "cache", progress=kill)
    assert list((tmp_path / "cache").rglob("chunk-*.npz"))
    extractor = regions()
    resumed = build(source, tmp_path / "cache", extractor)
    assert 0 < int(extractor.network.calls) < PHOTOS  # type: ignore[arg-type]
    assert torch.equal(resumed.statistics.mean, whole.statistics.mean)
    assert torch.equal(resumed.statistics.covariance, whole.statistics.covariance)
    assert resumed.sample is not None
    assert np.array_equal(resumed.sample, whole.sample)  # type: ignore[arg-type]
    assert resumed.identity == whole.identity


def test_two_runs_share_one_reference(tmp_path: Path) -> None:
    source = flat(tmp_path)
    extractors = [regions(), regions()]

    def work(extractor: Extractor) -> Reference:
        return build(source, tmp_path / "cache", extractor)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(work, extractors))
    assert sorted(int(extractor.network.calls) for extractor in extractors) == [0, PHOTOS]  # type: ignore[arg-type]
    assert torch.equal(found[0].statistics.mean, found[1].statistics.mean)


def test_processes_share_the_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_chunks: None) -> None:
    pictures = SourceImages(open_source(flat(tmp_path)))
    alone = extract(pictures, regions(), tmp_path / "alone")
    calls = []
    for rank in (1, 0):  # in a launch they run at once, and wait for each other at the end
        state = SimpleNamespace(num_processes=2, process_index=rank, wait_for_everyone=lambda: None)
        monkeypatch.setattr(extraction, "process_state", lambda state=state: state)
        extractor = regions()
        shared = extract(pictures, extractor, tmp_path / "shared")
        calls.append(int(extractor.network.calls))  # type: ignore[arg-type]
    assert calls == [5, 7]
    assert [path.read_bytes() for path in shared.chunks] == [path.read_bytes() for path in alone.chunks]


LAUNCHED = """
import json, os, sys
from pathlib import Path
from support.runs import build, regions
from elfatt_sd.evaluation import extraction
from elfatt_sd.evaluation.processes import leave_processes, process_state

process_state("cpu")
extraction.CHUNK = 5
place, rank = Path(sys.argv[1]), os.environ["RANK"]

def attempt(source, cache, extractor=None):
    try:
        found = build(place / source, place / cache, extractor)
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
    launch = [*runs.TWO_PROCESSES, str(script), str(tmp_path)]
    paths = os.pathsep.join((str(runs.ROOT), str(runs.ROOT / "tests")))
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


def test_an_interrupted_look_at_a_run_folder_does_not_close_it(
    protocol: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Ctrl-C, and by SIGKILL, which leaves the file that was looked for."""
    run_dir = tmp_path / "run"

    def interrupted(value: Any) -> list[Any]:
        if isinstance(value, tuple):
            raise KeyboardInterrupt
        return [value]

    monkeypatch.setattr(processes, "among_others", lambda: True)
    monkeypatch.setattr(processes, "gathered", interrupted)
    with pytest.raises(KeyboardInterrupt):
        processes.check_shared(run_dir, "run folder", "give --out a folder that all machines share")
    assert not list(run_dir.iterdir())
    (run_dir / ".seen-0123456789abcdef.part").touch()
    Run(run_dir, protocol).check()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # numpy leaves a damaged zip open
@pytest.mark.parametrize("content", [b"", b"half", b"{}", b"other"])
@pytest.mark.parametrize("name", ["statistics.npz", "sample.npy", "reference.json"])
def test_a_damaged_cache_is_made_anew(tmp_path: Path, name: str, content: bytes) -> None:
    source, cache = flat(tmp_path), tmp_path / "cache"
    before = build(source, cache)
    (folder,) = cache.iterdir()
    whole = (folder / name).read_bytes()
    np.save(tmp_path / "other.npy", np.zeros((3, 3), dtype=np.float32))
    given = {b"half": whole[: len(whole) // 2], b"other": (tmp_path / "other.npy").read_bytes()}
    (folder / name).write_bytes(given.get(content, content))
    again = build(source, cache)
    assert torch.equal(before.statistics.covariance, again.statistics.covariance)
    assert (folder / name).read_bytes() == whole


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_chunk_is_made_anew(tmp_path: Path, small_chunks: None) -> None:
    pictures = SourceImages(open_source(flat(tmp_path)))
    before = [features for features, _ in extract(pictures, regions(), tmp_path / "c")]
    other = io.BytesIO()
    np.savez(other, features=before[2], unreadable=np.array("[1]"))
    for number, content in enumerate((b"", b"PK\x03\x04 no zip", other.getvalue())):
        (tmp_path / "c" / f"chunk-{number:05d}.npz").write_bytes(content)
    after = [features for features, _ in extract(pictures, regions(), tmp_path / "c")]
    assert all(np.array_equal(*pair) for pair in zip(before, after, strict=True))


def test_statistics_of_another_tool(tmp_path: Path) -> None:
    expected = expected_statistics()
    sigma = expected.covariance.float().numpy()
    sigma[0, 1] *= 1 + 1e-6  # rounding of single precision
    np.savez(tmp_path / "other.npz", mu=expected.mean, sigma=sigma)
    found = build(tmp_path / "other.npz", tmp_path)
    assert (found.sample, found.count, found.metric_suffix) == (None, None, " (statistics of other.npz)")
    torch.testing.assert_close(found.statistics.covariance, expected.covariance, rtol=1e-5, atol=1e-6)
    assert torch.equal(found.statistics.covariance, found.statistics.covariance.T)
    expected.save(tmp_path / "ours.npz")
    assert build(tmp_path / "ours.npz", tmp_path).metric_suffix == " (12 reference images)"
    with pytest.raises(ElfattError, match="accepted are 50000"):
        build(tmp_path / "ours.npz", tmp_path, count=50_000)
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
    for source, count in (("renders:6", 6), ("toy", PHOTOS)):
        found = build(source, tmp_path, count=count, classes=chosen)
        assert (found.count, found.metric_suffix) == (count, "")
    for wrong in ("renders:0", "renders:x", "renders:1"):
        with pytest.raises(ElfattError, match="renders:COUNT"):
            build(wrong, tmp_path)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        *(({"count": count}, "has count") for count in (1, -3, 2.5, float("nan"), float("inf"), "many")),
        ({"count": [2, 3]}, "cannot be read"),
        ({"sigma": np.diag([-1.0] + 11 * [1.0])}, "negative eigenvalue -1"),
        ({"sigma": np.triu(np.ones((12, 12)))}, "not symmetric"),
        ({"sigma": np.full((12, 12), np.nan)}, "NaN"),
        ({"count": 12}, "count 12 and a sigma of rank 12"),
        ({"sigma": np.eye(12) * 1e31}, "too large"),
        ({"sigma": np.zeros((12, 12))}, "one image over and over"),
        ({"sigma": np.ones((12, 12), dtype=object)}, "cannot be read"),
        ({"mu": np.array(["1"] * 12)}, "cannot be read"),
        ({"mu": np.full(12, 1j)}, "cannot be read"),
    ],
)
def test_impossible_statistics_are_refused(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    arrays = {"mu": np.zeros(12), "sigma": np.eye(12), "count": np.int64(PHOTOS)}
    np.savez(tmp_path / "odd.npz", **(arrays | changed))
    with pytest.raises(ElfattError, match=said) as error:
        build(tmp_path / "odd.npz", tmp_path)
    assert "odd.npz" in str(error.value) and "\n" not in str(error.value)
