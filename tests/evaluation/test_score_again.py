"""What is computed once, goes on after a kill, and is scored anew where something changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scored_runs import CELLS, COUNT, counting, protocol, write_run

from elfatt_sd.evaluation import extraction, score
from elfatt_sd.evaluation.features import Extractor
from elfatt_sd.evaluation.protocols import Protocol, Reference
from elfatt_sd.evaluation.run import Run
from elfatt_sd.evaluation.score import build_references, score_run


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELFATT_SD_CACHE", str(cache))


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def test_a_killed_scoring_goes_on_and_gives_the_same_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = counting(monkeypatch)
    monkeypatch.setattr(extraction, "CHUNK", 16)
    monkeypatch.setattr(extraction, "BATCH", 8)
    run_dir = write_run(tmp_path / "run", protocol())
    score_run(Run.open(run_dir))
    whole = (run_dir / "scores.json").read_bytes()
    for path in (run_dir / "scores").iterdir():
        path.unlink()
    (run_dir / "scores.json").unlink()
    seen: list[int] = []

    def kill(_: str, done: int, __: int) -> None:
        seen.append(done)
        if len(seen) == 8:
            raise Killed

    with pytest.raises(Killed):
        score_run(Run.open(run_dir), progress=kill)
    (parts,) = (run_dir / "scores").glob("*.parts")
    (parts / ".chunk-00001.npz.123.part").write_bytes(b"half")  # as SIGKILL leaves it, which no `finally` follows
    before = len(made)
    score_run(Run.open(run_dir))
    assert 0 < int(made[before].network.calls) < 4 * COUNT  # type: ignore[arg-type]
    assert (run_dir / "scores.json").read_bytes() == whole
    assert not list((run_dir / "scores").rglob("*.part*"))


def test_features_are_computed_once_per_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = counting(monkeypatch)
    run_dir = write_run(tmp_path / "run", protocol())
    build_references(protocol())
    told: list[list[tuple[str, int, int]]] = [[], []]
    for calls in told:
        score_run(Run.open(run_dir), progress=lambda *call, calls=calls: calls.append(call))  # type: ignore[misc]
    compared = [(f"{cell.name}, PSNR and SSIM", COUNT, COUNT) for cell in CELLS[1:]]
    assert [call for call in told[0] if "PSNR" in call[0] and call[1] == call[2]] == compared
    assert not told[1], "nothing is looked at twice"
    assert [int(extractor.network.calls) for extractor in made[1:]] == [4 * COUNT, 0]  # type: ignore[arg-type]


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf, 2.0])
def test_kept_changes_that_cannot_be_are_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: float
) -> None:
    counting(monkeypatch)
    run_dir = write_run(tmp_path / "run", protocol())
    build_references(protocol())
    score_run(Run.open(run_dir))
    scores = (run_dir / "scores.json").read_bytes()
    (kept,) = (run_dir / "scores").glob("tome-pairs-*.npy")
    changes = np.load(kept)
    changes[3, 1] = odd
    np.save(kept, changes)
    score_run(Run.open(run_dir))
    assert (run_dir / "scores.json").read_bytes() == scores


def test_what_scores_depend_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extractor and the reference, neither of which the run's own folder shows."""
    made = counting(monkeypatch)

    def inputs(specification: Protocol) -> dict[str, str]:
        return score.score_inputs(specification, score.load_extractors(specification))

    pixels = np.zeros((8, 8, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    Image.fromarray(~pixels).save(tmp_path / "b.png")
    specification = protocol(reference=Reference(str(tmp_path), count=2))
    before = inputs(specification)
    assert inputs(specification) == before
    assert before == {"FD-regions": build_references(specification)[0].identity}
    Image.fromarray(pixels[:4]).save(tmp_path / "b.png")
    replaced = inputs(specification)
    assert replaced != before
    load = score.load_extractor

    def retrained(spec: str, **options: Any) -> Extractor:
        extractor = load(spec, **options)
        extractor.preprocessing["sha256"] = "of other weights"
        return extractor

    monkeypatch.setattr(score, "load_extractor", retrained)
    assert inputs(specification) not in (before, replaced)
    assert [int(extractor.network.calls) for extractor in made].count(0) == len(made) - 1  # type: ignore[arg-type]
    np.savez(tmp_path / "other.npz", mu=np.zeros(12), sigma=np.eye(12))
    moments = protocol(reference=Reference(str(tmp_path / "other.npz")))
    assert inputs(moments) == {"FD-regions": build_references(moments)[0].identity}
