"""Rows that another run made already are copied; all others are made."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import small_run
from small_run import row_of, run_data

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation import generate
from elfatt_sd.evaluation.generate import take_over
from elfatt_sd.evaluation.protocols import Protocol
from elfatt_sd.evaluation.run import RUN_FILE, Row, Run
from elfatt_sd.files import folder_lock, write_json


def make(run_dir: Path, protocol: Protocol, *reuse: Path) -> None:
    with folder_lock(run_dir):
        assert (
            generate.generate(Run(run_dir, protocol), reuse=[Run.open(each) for each in reuse], show_progress=False)
            == {}
        )


def images(run_dir: Path, protocol: Protocol) -> dict[str, list[str]]:
    return {cell.name: [entry.sha256 for entry in row_of(run_dir, cell).made_images()] for cell in protocol.cells}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Path, Protocol]:
    """A finished generation and its protocol."""
    place = tmp_path_factory.mktemp("made")
    protocol = small_run.small_protocol(place, model)
    make(place / "run", protocol)
    return place / "run", protocol


def renamed(protocol: Protocol, method: str) -> Protocol:
    """The same protocol under another name, its third row under another name and with another block size."""
    untouched, null, third, peer = protocol.cells
    other = dataclasses.replace(third, name="other", settings={**third.settings, "block_size": 32})
    return dataclasses.replace(
        protocol, name=method, cells=(untouched, dataclasses.replace(null, name="seeds"), third, other, peer)
    )


def test_rows_of_the_same_images_are_copied(
    made: tuple[Path, Protocol], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, protocol = made
    larger = renamed(protocol, "larger")
    generated: list[str] = []
    original = generate._Maker.make_batch

    def note(maker: generate._Maker, row: Row, *rest: Any) -> None:
        generated.append(row.name)
        original(maker, row, *rest)

    monkeypatch.setattr(generate._Maker, "make_batch", note)
    make(tmp_path / "reusing", larger, there)
    assert set(generated) == {"other"}
    make(tmp_path / "alone", larger)
    assert images(tmp_path / "reusing", larger) == images(tmp_path / "alone", larger)


@pytest.mark.parametrize("changed", [{"steps": 3}, {"seed": 4}, {"guidance": 2.0}, {"batch": 1}])
def test_rows_of_other_images_are_not(made: tuple[Path, Protocol], tmp_path: Path, changed: dict[str, float]) -> None:
    there, protocol = made
    other = dataclasses.replace(protocol, **changed)  # type: ignore[arg-type]
    run = run_data(there)
    assert run is not None
    write_json(tmp_path / RUN_FILE, {**run, "protocol": other.to_dict(), "identity": other.identity})
    assert take_over(Run(tmp_path, other), [Run.open(there)]) == {}


def test_rows_of_another_machine_are_not(made: tuple[Path, Protocol], tmp_path: Path) -> None:
    there, protocol = made
    run = run_data(there)
    assert run is not None
    elsewhere = {**run, "environment": {**run["environment"], "device": "another"}}
    write_json(tmp_path / RUN_FILE, elsewhere)
    assert take_over(Run(tmp_path, protocol), [Run.open(there)]) == {}
    write_json(tmp_path / RUN_FILE, run)
    assert set(take_over(Run(tmp_path, protocol), [Run.open(there)])) == {cell.name for cell in protocol.cells}


def test_each_row_is_told(made: tuple[Path, Protocol], tmp_path: Path) -> None:
    """Of a row that is not taken over, what it was made with; and a model counts by its weights, not by its place."""
    there, protocol = made
    run = run_data(there)
    assert run is not None
    (tmp_path / "model").symlink_to(protocol.model)
    elsewhere = dataclasses.replace(protocol, model=str(tmp_path / "model"))
    for device, said in ((run["environment"]["device"], "reused"), ("another", "not reused: device: ")):
        place, told = tmp_path / said[:3], []  # type: tuple[Path, list[str]]
        write_json(place / RUN_FILE, {**run, "environment": {**run["environment"], "device": device}})
        taken = take_over(Run(place, elsewhere), [Run.open(there)], told.append)
        assert len(taken) == (len(protocol.cells) if said == "reused" else 0)
        assert [line.partition(f" of {there} is ")[0] for line in told] == [
            f"generate: row {cell.name}" for cell in protocol.cells
        ]
        assert all(f" is {said}" in line for line in told)


@pytest.mark.parametrize("change", ["cut", "other prompt"])
def test_lists_of_other_images_are_not_taken(made: tuple[Path, Protocol], tmp_path: Path, change: str) -> None:
    there, protocol = made
    shutil.copytree(there, tmp_path / "there")
    manifest = row_of(tmp_path / "there", protocol.cells[0]).manifest
    lines = manifest.read_text(encoding="utf-8").splitlines(keepends=True)
    lines = lines[:3] if change == "cut" else [line.replace("owl", "dove") for line in lines]
    manifest.write_text("".join(lines), encoding="utf-8")
    run, told = Run(tmp_path / "new", protocol), list[str]()
    run.begin(run_data(there)["environment"])
    taken = take_over(run, [Run.open(tmp_path / "there")], told.append)
    assert protocol.cells[0].name not in taken and len(taken) == len(protocol.cells) - 1
    assert sum("does not list this run's images" in line for line in told) == 1


def test_an_altered_image_is_named(made: tuple[Path, Protocol], tmp_path: Path) -> None:
    there, protocol = made
    make(tmp_path / "copy", protocol, there)
    path = row_of(tmp_path / "copy", protocol.cells[1]).image_file(2)
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(ElfattError, match=r"00002\.png is not the image that was generated; row 'null'"):
        make(tmp_path / "again", protocol, tmp_path / "copy")


def test_rows_of_other_code_are_made_again_and_the_untouched_are_not(
    made: tuple[Path, Protocol], tmp_path: Path
) -> None:
    there, protocol = made
    run = run_data(there)
    assert run is not None
    environment = {**run["environment"], "method_sha256": "of other code"}
    write_json(tmp_path / RUN_FILE, {**run, "environment": environment})
    assert set(take_over(Run(tmp_path, protocol), [Run.open(there)])) == {"sd", "null", "tomesd-ratio0.5"}


def test_a_row_that_failed_before_it_was_taken_over_has_not_failed(made: tuple[Path, Protocol], tmp_path: Path) -> None:
    there, protocol = made
    run = run_data(there)
    assert run is not None
    write_json(tmp_path / RUN_FILE, run)
    cell = protocol.cells[1]
    write_json(row_of(tmp_path, cell).failure_file, {"reason": "image 0 is black"})
    take_over(Run(tmp_path, protocol), [Run.open(there)])
    assert row_of(tmp_path, cell).manifest.is_file()
    assert row_of(tmp_path, cell).failure is None


def test_a_folder_without_a_run_is_refused(made: tuple[Path, Protocol], tmp_path: Path) -> None:
    with pytest.raises(ElfattError, match="holds no run"):
        make(tmp_path / "new", made[1], tmp_path / "nothing")
