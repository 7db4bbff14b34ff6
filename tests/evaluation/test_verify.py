"""Verification names what was altered, deleted, added or edited."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from small_run import row_of

from elfatt_sd.evaluation.memory import summarize_memory
from elfatt_sd.evaluation.protocols import Protocol
from elfatt_sd.evaluation.report import load_results, write_report
from elfatt_sd.evaluation.results import write_results
from elfatt_sd.evaluation.run import RUN_FILE, Run
from elfatt_sd.evaluation.verify import _check_cost, unequal, verify_run

ELFATT = "elfatt-ratio0.5-block_size16-agents8"


def test_a_finished_run_is_in_order(copy: Path) -> None:
    told: list[Any] = []
    assert verify_run(Run.open(copy), progress=lambda *seen: told.append(seen)) == []
    assert {seen[1:] for seen in told} >= {(5, 5)}  # the images of a row, while they are scored again


def _alter(run_dir: Path, image: Path) -> None:
    with Image.open(image) as picture:
        flipped = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    flipped.save(image)


def _delete(run_dir: Path, image: Path) -> None:
    image.unlink()


def _add(run_dir: Path, image: Path) -> None:
    shutil.copy(image, image.with_name("00009.png"))


def _swap_prompt(run_dir: Path, image: Path) -> None:
    manifest = image.parents[1] / "manifest.jsonl"
    manifest.write_text(manifest.read_text().replace('"owl"', '"eagle"'))


def _swap_class(run_dir: Path, image: Path) -> None:
    manifest = image.parents[1] / "manifest.jsonl"
    manifest.write_text(manifest.read_text().replace('"class_index": 2', '"class_index": 1'))


def _point_elsewhere(run_dir: Path, image: Path) -> None:
    manifest = image.parents[1] / "manifest.jsonl"
    manifest.write_text(manifest.read_text().replace("images/00002.png", "../other.png"))


def _cut_manifest(run_dir: Path, image: Path) -> None:
    manifest = image.parents[1] / "manifest.jsonl"
    manifest.write_text("".join(manifest.read_text().splitlines(keepends=True)[:-1]))


def _edit_protocol(run_dir: Path, image: Path) -> None:
    path = run_dir / RUN_FILE
    path.write_text(path.read_text().replace('"guidance": 7.5', '"guidance": 5.0'))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_alter, "cells/null/images/00002.png: altered"),
        (_delete, "cells/null/images/00002.png: deleted"),
        (_add, "cells/null/images/00009.png: not an image of this run"),
        (_swap_prompt, "cells/null/manifest.jsonl: images, prompts, classes or seeds are not"),
        (_swap_class, "cells/null/manifest.jsonl: images, prompts, classes or seeds are not"),
        (_point_elsewhere, "cells/null/manifest.jsonl: file='../other.png' is not where image 2 lies"),
        (_cut_manifest, "cells/null/manifest.jsonl: images, prompts, classes or seeds are not"),
        (_edit_protocol, "run.json: the protocol does not have the identity"),
    ],
)
def test_damage_is_named(
    copy: Path, full_protocol: Protocol, damage: Callable[[Path, Path], None], message: str
) -> None:
    damage(copy, row_of(copy, full_protocol.cells[1]).image_file(2))
    problems = verify_run(Run.open(copy))
    assert any(message in problem for problem in problems), problems


def _edit(path: Path, change: Callable[[Any], None]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_edited_scores_are_found_by_computing_them_anew(copy: Path) -> None:
    def improve(data: Any) -> None:
        data["rows"]["null"]["distances"]["FD-CLIP (ViT of width 32/8@32) (12 reference images)"]["value"] *= 0.9

    _edit(copy / "scores.json", improve)
    (problem, *rest) = verify_run(Run.open(copy))
    assert "scores.json: rows.null.distances.FD-CLIP (ViT of width 32/8@32) (12 reference images).value is" in problem
    assert any("results.json" in line for line in rest)
    assert all("results.json" in line for line in verify_run(Run.open(copy), recompute=False))


def test_an_edited_reference_is_found_by_computing_it_anew(copy: Path) -> None:
    def enlarge(data: Any) -> None:
        data["references"]["FD-CLIP (ViT of width 32/8@32) (12 reference images)"]["count"] = 50_000

    _edit(copy / "scores.json", enlarge)
    (problem, _) = verify_run(Run.open(copy))
    assert (
        "scores.json: references.FD-CLIP (ViT of width 32/8@32) (12 reference images).count is 50000, computed again 12"
        in problem
    )


@pytest.mark.parametrize("change", ["halve", "drop"])
def test_an_edited_cost_is_found_by_working_it_out_anew(copy: Path, change: str) -> None:
    def edit(data: Any) -> None:
        if change == "drop":
            del data["rows"]["null"]
        else:
            data["rows"][ELFATT]["multiply_adds"] //= 2

    _edit(copy / "cost.json", edit)
    problem = verify_run(Run.open(copy))[0]
    place = "null is None" if change == "drop" else f"{ELFATT}.multiply_adds is"
    assert f"cost.json: {place}" in problem
    assert "worked out again" in problem


def test_a_cost_that_cannot_be_worked_out_is_named(copy: Path) -> None:
    _edit(copy / "run.json", lambda data: data["protocol"].update(model=str(copy / "none")))
    run = Run.open(copy)
    (problem,) = _check_cost(run)
    assert "cost.json: it cannot be worked out again" in problem


def _halve_time(data: Any) -> None:
    data["rows"][2]["time"]["unet"]["seconds_per_image"] /= 2


def _change_little(data: Any) -> None:
    data["rows"][2]["distances"]["FD-CLIP (ViT of width 32/8@32) (12 reference images)"]["value"] *= 1 - 1e-6


def _count_more(data: Any) -> None:
    data["rows"][2]["paired"]["psnr"]["identical"] += 1


def _change_steps(data: Any) -> None:
    data["protocol"]["steps"] = 50


def _change_machine(data: Any) -> None:
    data["environment"]["timing"]["environment"]["device"] = "Abacus"


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (_halve_time, "rows[elfatt-ratio0.5-block_size16-agents8].time.unet.seconds_per_image"),
        (_change_little, "distances.FD-CLIP (ViT of width 32/8@32) (12 reference images).value"),
        (_count_more, "paired.psnr.identical is 1,"),
        (_change_steps, "protocol.steps is 50, in the files of the stages 4"),
        (_change_machine, "environment.timing.environment.device is Abacus"),
    ],
)
def test_edited_results_are_found(copy: Path, change: Callable[[Any], None], place: str) -> None:
    _edit(copy / "results.json", change)
    (problem,) = verify_run(Run.open(copy), recompute=False)
    assert "results.json: " in problem
    assert place in problem


def _quicken(data: Any) -> None:
    data["rows"][ELFATT]["unet"]["seconds_per_image"] /= 2


def _speed_up(data: Any) -> None:
    data["rows"][ELFATT]["end_to_end"]["ratio"]["low"] = 1.5


def _be_sure(data: Any) -> None:
    data["note"] = None


def _lose_a_round(data: Any) -> None:
    for scope in ("end_to_end", "unet"):
        del data["rows"][ELFATT][scope]["values"][0]


def _forget_values(data: Any) -> None:
    del data["rows"][ELFATT]["unet"]["values"]


def _flatten(data: Any) -> None:
    data["rows"][ELFATT]["gib_per_image"] -= 0.5


def _lower_the_twin(data: Any) -> None:
    data["rows"]["null"]["peaks_gib"][0] /= 2


def _lose_a_peak(data: Any) -> None:
    data["rows"][ELFATT] = summarize_memory([2], [{"kind": "VmHWM", "peaks": {"all": 1.0}}])


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("time.json", _quicken, f"rows.{ELFATT}.unet.seconds_per_image is"),
        ("time.json", _speed_up, f"rows.{ELFATT}.end_to_end.ratio.low is 1.5, from the raw values"),
        ("time.json", _be_sure, "note is None, from the raw values only 2 repeats"),
        ("time.json", _lose_a_round, f"row {ELFATT} has 1 of 2 rounds"),
        ("time.json", _forget_values, "damaged, there are not all raw values (KeyError('values'))"),
        ("memory.json", _flatten, f"rows.{ELFATT}.gib_per_image is"),
        ("memory.json", _lower_the_twin, "rows.null.peaks_gib[0] is"),
        ("memory.json", _lose_a_peak, "peaks of batches [2]"),
    ],
)
def test_figures_that_do_not_follow_from_their_raw_values_are_found(
    copy: Path, file: str, change: Callable[[Any], None], message: str
) -> None:
    """Although `results.json` was made again from them."""
    _edit(copy / file, change)
    write_results(Run.open(copy))
    (problem,) = verify_run(Run.open(copy), recompute=False)
    assert f"{file}: " in problem
    assert message in problem


def test_raw_values_of_a_gpu_and_of_rows_that_failed_are_understood(copy: Path) -> None:
    results = [
        {
            "kind": "CUDA allocated",
            "peaks": {"text": 1.0, "unet": 1.5 * batch, "vae": 2.0},
            "reserved": {"text": 1.0, "unet": 2.0, "vae": 3.0 * batch},
        }
        for batch in (1, 2)
    ]

    def allocate(data: Any) -> None:
        data["rows"]["sd"] = summarize_memory([1, 2], results)
        data["rows"]["null"] = data["rows"]["sd"] | {"same_program_as": "sd"}
        data["rows"]["tomesd-ratio0.5"] = summarize_memory([], [], "not installed")

    def fail(data: Any) -> None:
        data["rows"]["sd"] = {"failed": "out of memory at batch 1"}
        for name in ("null", ELFATT, "tomesd-ratio0.5"):
            for scope in ("end_to_end", "unet"):
                data["rows"][name][scope]["ratio"] = None

    _edit(copy / "memory.json", allocate)
    _edit(copy / "time.json", fail)
    write_results(Run.open(copy))
    assert not [problem for problem in verify_run(Run.open(copy), recompute=False) if "/report/" not in problem]


@pytest.mark.parametrize("name", ["table.csv", "index.html"])
def test_an_edited_report_is_found(copy: Path, name: str) -> None:
    path = copy / "report" / name
    path.write_bytes(path.read_bytes().replace(b"ELFATT-SD", b"ELFATT-SD*", 1))
    (problem,) = verify_run(Run.open(copy), recompute=False)
    assert f"report/{name}: not that of results.json" in problem


def test_a_report_of_another_version_is_told_from_one_that_was_altered(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("elfatt_sd.__version__", "0.0.9")
        patch.setattr("elfatt_sd.evaluation.report.summary._null", lambda results: "An older sentence.")
        patch.setattr("elfatt_sd.evaluation.report.commit_of", lambda folder: "0123456789abcdef")
        write_report(load_results(copy))
    told = verify_run(Run.open(copy), recompute=False)
    assert {line.partition("report/")[2].split(":")[0] for line in told} == {"table.md", "index.html"}
    assert all(
        "as version 0.0.9 at commit 0123456789ab wrote it, and not as this version does" in line for line in told
    )
    path = copy / "report/table.md"
    path.write_bytes(path.read_bytes() + b"Better.\n")
    told = [line for line in verify_run(Run.open(copy), recompute=False) if "table.md" in line]
    assert ["not that of results.json; " in line for line in told] == [True]
    (copy / "report/written.json").write_text("[]")
    assert all("not that of results.json; " in line for line in verify_run(Run.open(copy), recompute=False))


def test_the_report_has_all_its_files_and_no_others(copy: Path) -> None:
    for name in ("table.tex", "index.html", "closeness.png"):
        (copy / "report" / name).unlink()
    (copy / "report" / "ablation_old.png").touch()
    problems = verify_run(Run.open(copy), recompute=False)
    assert [problem.partition("report/")[2].split(",")[0] for problem in problems] == [
        "table.tex: deleted", "closeness.png: deleted", "index.html: deleted", "ablation_old.png: not of this report",
    ]  # fmt: skip


def test_missing_files_are_named(copy: Path) -> None:
    (copy / "scores.json").unlink()
    assert any("scores.json: deleted" in problem for problem in verify_run(Run.open(copy)))


def test_numbers_with_a_fraction_are_compared_with_a_tolerance() -> None:
    assert list(unequal({"a": [1.0, 2]}, {"a": [1.0 + 1e-6, 2]})) == []
    assert list(unequal({"a": [1.0, 2]}, {"a": [1.01, 2]})) == [("a[0]", 1.0, 1.01)]
    assert list(unequal({"a": 1.0}, {"a": 1.0 + 1e-6}, tolerance=0)) == [("a", 1.0, 1.0 + 1e-6)]
    assert list(unequal({"a": 10_000}, {"a": 10_001})) == [("a", 10_000, 10_001)]
    assert list(unequal({"a": 1}, {"b": 1})) == [("a", 1, None), ("b", None, 1)]
    assert len(list(unequal({"a": float("nan")}, {"a": 1.0}))) == 1


def test_the_tolerance_of_a_difference_is_that_of_its_figure() -> None:
    """A difference near 0 has the rounding errors of the distances that it is of."""

    def distance(difference: float, low: float = -0.5) -> dict[str, Any]:
        ends = {"value": difference, "interval": [low, 0.5], "verdict": "no difference shown"}
        return {"FID": {"value": 20.0, "interval": [19.0, 21.0], "difference": ends}}

    assert list(unequal(distance(1e-5), distance(3e-5))) == []
    assert list(unequal(distance(1e-5), distance(0.1))) == [("FID.difference.value", 1e-5, 0.1)]
    assert list(unequal(distance(0.0), distance(0.0, -0.6))) == [("FID.difference.interval[0]", -0.5, -0.6)]
    assert list(unequal({"value": 0.0, "interval": [-2.0, 2.0]}, {"value": 1e-3, "interval": [-2.0, 2.0]})) == []
