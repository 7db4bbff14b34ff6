"""A run: its folder, its protocol, and its rows, each of which knows its files."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.processes import process_state
from elfatt_sd.evaluation.prompts import Prompt, run_prompts
from elfatt_sd.evaluation.protocols import Cell, Protocol, differences
from elfatt_sd.evaluation.records import Environment, Failure, MadeImage, RunRecord, same_images
from elfatt_sd.files import (
    check_file,
    folder_lock,
    is_full,
    is_hidden,
    nearest_existing,
    parse_json,
    read_plain,
    read_typed,
    visible,
    write_file,
    write_json,
)
from elfatt_sd.measure import now

RUN_FILE, SCORES_FILE, TIME_FILE, MEMORY_FILE = "run.json", "scores.json", "time.json", "memory.json"
STAGES_FILE, COST_FILE = "stages.json", "cost.json"
_LOST = "put the file back from a copy, as what made the images is recorded nowhere else; or give a new folder"


class RunFailure(RuntimeError):
    """Work that failed although it was asked for rightly; the message is one line."""


@dataclass(frozen=True)
class RowFolder:
    """The folder of a row, and where its files are."""

    folder: Path

    @property
    def images_folder(self) -> Path:
        return self.folder / "images"

    def image_file(self, index: int) -> Path:
        return self.images_folder / f"{index:05d}.png"

    @property
    def manifest(self) -> Path:
        return self.folder / "manifest.jsonl"  # of the images with their hashes; it is there once all of them are

    @property
    def batches_folder(self) -> Path:
        return self.folder / "batches"  # with a list for each batch while the row is not finished

    @property
    def finished(self) -> bool:
        return self.manifest.is_file()

    def made_images(self) -> list[MadeImage]:
        if not self.manifest.exists():
            raise ElfattError(f"{self.manifest} does not exist; row {self.folder.name!r} is not made yet.")
        return self._listed([self.manifest], f"delete the file to make row {self.folder.name!r} again")

    def known_images(self) -> list[MadeImage]:
        """Return what was generated so far, also where the row is not finished."""
        lists = [self.manifest] if self.finished else visible(self.batches_folder.glob("*.jsonl"))
        remedy = f"delete the file to make {'row' if self.finished else 'these images of'} {self.folder.name!r} again"
        return self._listed(lists, remedy)

    def _listed(self, lists: Sequence[Path], remedy: str) -> list[MadeImage]:
        made: list[MadeImage] = []
        for path in lists:
            try:
                content = read_plain(path)
            except OSError as error:
                raise ElfattError(f"{path} cannot be read ({error.strerror}); {remedy}.") from error
            for number, line in enumerate(content.split(b"\n"), 1):  # a prompt may hold other marks that end lines
                if line.strip():
                    place = f"{path}, line {number}"
                    try:
                        data = parse_json(line)
                    except ValueError as error:
                        raise ElfattError(f"{place} is damaged ({error}); {remedy}.") from error
                    made.append(check_file(place, data, MadeImage, remedy))
        for index, image in enumerate(made if self.finished else ()):
            if image.index != index:
                what = f"{self.manifest}: index={image.index} of image {index + 1}"
                raise ElfattError(f"{what} is not accepted; accepted: {index}; {remedy}.")
        return made


@dataclass(frozen=True)
class Row(RowFolder):
    cell: Cell  # the method with its settings
    first_seed: int  # of the first image; the next ones count up

    @property
    def name(self) -> str:
        return self.cell.name

    def batch_file(self, number: int) -> Path:
        return self.batches_folder / f"{number:06d}.jsonl"

    @property
    def begun(self) -> bool:
        return self.finished or self.batches_folder.is_dir()

    def has_batch(self, number: int, prompts: Sequence[Prompt]) -> bool:
        try:
            made = self._listed([self.batch_file(number)], "")
        except ElfattError:
            return False
        return [each.index for each in made] == [each.index for each in prompts]

    def add_batch(self, number: int, made: Sequence[MadeImage]) -> None:
        # the images are in their places: this commits them
        lines = [json.dumps(msgspec.structs.asdict(each), ensure_ascii=False) + "\n" for each in made]
        write_file(self.batch_file(number), "".join(lines).encode())

    def finish(self, manifest: bytes) -> None:
        self.failure_file.unlink(missing_ok=True)  # first: no finished row is ever said to have failed
        write_file(self.manifest, manifest)
        shutil.rmtree(self.batches_folder, ignore_errors=True)

    def fail(self, reason: str) -> None:
        write_json(self.failure_file, {"reason": reason})

    @property
    def failure_file(self) -> Path:
        return self.folder / "failed.json"

    @property
    def failure(self) -> str | None:
        found = read_typed(self.failure_file, Failure, "delete it")
        return None if found is None else found.reason


@dataclass(frozen=True)
class Run:
    """A folder with all that a protocol asks for."""

    folder: Path  # of the run; it need not be there yet
    protocol: Protocol  # what is evaluated

    @classmethod
    def open(cls, folder: Path) -> Run:
        record = _read_record(folder)
        if record is None:
            raise ElfattError(f"{folder} holds no run ({RUN_FILE} is missing); give a folder that `eval run` has made.")
        try:
            return cls(folder, Protocol.from_dict(record.protocol))
        except ElfattError as error:
            raise ElfattError(f"{folder / RUN_FILE}: {str(error).removesuffix('.')}; {_LOST}.") from error

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        first = self.protocol.seed
        return tuple(
            Row(self.folder / "cells" / cell.name, cell, first + cell.seed_offset) for cell in self.protocol.cells
        )

    @property
    def baseline(self) -> Row:
        return self.row(self.protocol.baseline.name)

    @property
    def finished(self) -> list[Row]:
        return [row for row in self.rows if row.finished]

    def row(self, name: str) -> Row:
        return self.rows[self.protocol.cells.index(self.protocol.cell(name))]

    @cached_property
    def prompts(self) -> list[Prompt]:
        return run_prompts(self.protocol)

    @cached_property
    def batches(self) -> list[list[Prompt]]:
        size = self.protocol.batch
        return [self.prompts[start : start + size] for start in range(0, len(self.prompts), size)]

    def shows_its_prompts(self, row: Row, made: Sequence[MadeImage]) -> bool:
        wanted = [(each.index, each.text, each.class_index, row.first_seed + each.index) for each in self.prompts]
        return [(each.index, each.prompt, each.class_index, each.seed) for each in made] == wanted

    @property
    def record(self) -> RunRecord:
        found = _read_record(self.folder)
        if found is None:
            raise ElfattError(f"{self.folder} holds no run ({RUN_FILE} is missing); generate its images first.")
        return found

    def check(self) -> None:
        """Refuse a folder that belongs to another protocol or to something else."""
        source = Path(self.protocol.reference.source).resolve()
        if source.exists() and source.is_relative_to(self.folder.resolve()):
            raise ElfattError(f"reference {source} is of this run; give images that it is compared with.")
        record = _read_record(self.folder)
        if record is None:
            there = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
            for name in there:
                if not is_hidden(name) and not name.endswith(".part"):
                    said = f"is not empty and holds no run (there is {name!r})"
                    raise ElfattError(f"{self.folder} {said}; give a new folder.")
            return
        now = self.protocol.to_dict()
        if record.identity != self.protocol.identity:
            listed = "; ".join(differences(record.protocol, now)) or "the file was edited"
            raise ElfattError(f"{self.folder} holds a run of another specification ({listed}); {self._new_folder}.")
        if record.protocol != now:  # a description or a printed figure was mended
            self._write(record, protocol=now)

    def check_environment(self, environment: Mapping[str, Any]) -> None:
        """Refuse to go on where images would come out differently."""
        record = _read_record(self.folder)
        begun = [row.cell for row in self.rows if row.begun]
        changed = same_images(record.environment, environment, begun) if record else []
        if changed:
            raise ElfattError(
                f"{self.folder} was begun where images come out differently ({'; '.join(changed)}); "
                f"go on there, or {self._new_folder}."
            )

    def begin(self, environment: Mapping[str, Any]) -> None:
        """Write `run.json`, or note in it what makes the images from now on."""
        new = RunRecord(1, self.protocol.identity, now(), self.protocol.to_dict(), {})
        self._write(_read_record(self.folder) or new, environment=dict(environment))

    def _write(self, record: RunRecord, **changes: Any) -> None:
        data = msgspec.structs.asdict(msgspec.structs.replace(record, **changes))
        name = {"format": data.pop("format"), "name": self.protocol.name}
        write_json(self.folder / RUN_FILE, {**name, **data})

    @property
    def _new_folder(self) -> str:
        return f"give a new folder, and --reuse {self.folder} to take over the rows that stay the same"

    @contextlib.contextmanager
    def writing(self, device: str | None = None) -> Iterator[bool]:
        """Hold the lock of the folder, in the first of several processes that work on a device."""
        first = bool(process_state(device or self.protocol.device).is_main_process)
        with clear_disk_errors(self.folder), folder_lock(self.folder) if first else contextlib.nullcontext():
            yield first

    @property
    def free_gib(self) -> float:
        """The free space of the disk that the folder is or will be on, in GiB."""
        return shutil.disk_usage(nearest_existing(self.folder)).free / 2**30


def _read_record(folder: Path) -> RunRecord | None:
    path = folder / RUN_FILE
    found = read_typed(path, RunRecord, _LOST)
    if found is not None:
        check_file(path, found.environment, Environment, _LOST)
    return found


@contextlib.contextmanager
def clear_disk_errors(folder: Path) -> Iterator[None]:
    """Turn a full disk, or a place that is not a file or cannot be written, into one clear line."""
    again = "and give the same command again."
    try:
        yield
    except OSError as error:
        if is_full(error):
            said = f"no space left on the disk of {folder}; finished work is kept: make room {again}"
            raise RunFailure(said) from error
        if not (error.filename and error.strerror):
            raise
        said = f"{error.filename}: {error.strerror}; finished work is kept: mend that {again}"
        raise RunFailure(said) from error
