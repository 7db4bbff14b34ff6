"""A run: its folder, its protocol, its rows with their files, and `results.json`, in which all that was measured is."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from elfatt_sd.errors import ElfattError, ElfattFailure
from elfatt_sd.evaluation import records
from elfatt_sd.evaluation.extraction import process_state
from elfatt_sd.evaluation.prompts import Prompt, run_prompts
from elfatt_sd.evaluation.protocols import Protocol, decisive, differences
from elfatt_sd.files import folder_lock, is_full, is_hidden, read_plain, read_typed, write_file, write_json
from elfatt_sd.measure import now
from elfatt_sd.methods.base import in_one_line

RUN_FILE, SCORES_FILE, TIME_FILE, MEMORY_FILE = "run.json", "scores.json", "time.json", "memory.json"
STAGES_FILE, COST_FILE, RESULTS_FILE = "stages.json", "cost.json", "results.json"
FORMAT = 1  # of `results.json`
_LOST = "put the file back from a copy, as what made the images is recorded nowhere else; or give a new folder"
_NEW_FOLDER = "give a new folder, and --reuse {} to take over the rows that stay the same"
_SCORED = ("images", "classes", "distances", "paired", "accuracy", "most_changed", "metrics")


class RowFolder:
    """The folder of a row: its images, and what is recorded of them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, folder.name
        self.images_folder = folder / "images"
        self.manifest = folder / "manifest.jsonl"  # of the images with their hashes; it is there once all of them are
        self.batches_folder = folder / "batches"  # with a list for each batch while the row is not finished
        self.failure_file = folder / "failed.json"

    def image_file(self, index: int) -> Path:
        return self.images_folder / f"{index:05d}.png"

    def batch_file(self, number: int) -> Path:
        return self.batches_folder / f"{number:06d}.jsonl"

    @property
    def finished(self) -> bool:
        return self.manifest.is_file()

    @property
    def failure(self) -> str | None:
        found = read_typed(self.failure_file, records.Failure, "delete it")
        return None if found is None else found.reason

    def made_images(self) -> list[records.MadeImage]:
        if not self.finished:
            raise ElfattError(f"{self.manifest} does not exist; row {self.name!r} is not made yet.")
        return _images_in(self.manifest, f"delete the file to make row {self.name!r} again")

    def has_batch(self, number: int, prompts: Sequence[Prompt]) -> bool:
        try:
            made = _images_in(self.batch_file(number), "")
        except (ElfattError, OSError):
            return False
        return [each.index for each in made] == [each.index for each in prompts]

    def finish(self, manifest: bytes) -> None:
        self.failure_file.unlink(missing_ok=True)  # first: no finished row is ever said to have failed
        write_file(self.manifest, manifest)
        shutil.rmtree(self.batches_folder, ignore_errors=True)


def _images_in(path: Path, remedy: str) -> list[records.MadeImage]:
    made, decoder = list[records.MadeImage](), msgspec.json.Decoder(records.MadeImage)
    for number, line in enumerate(read_plain(path).split(b"\n"), 1):  # a prompt may hold other marks that end lines
        with in_one_line(f"{path}, line {number} is damaged; {remedy}"):
            made += [decoder.decode(line)] if line.strip() else []
    return made


@dataclass(frozen=True)
class RunFolder:
    folder: Path  # of the run; it need not be there yet
    protocol: Protocol  # what is evaluated

    @classmethod
    def open(cls, folder: Path) -> RunFolder:
        record = _read_record(folder)
        try:
            return cls(folder, Protocol.from_dict(record.protocol))
        except ElfattError as error:
            raise ElfattError(f"{folder / RUN_FILE}: {str(error).removesuffix('.')}; {_LOST}.") from error

    @cached_property
    def rows(self) -> tuple[RowFolder, ...]:
        return tuple(RowFolder(self.folder / "cells" / cell.name) for cell in self.protocol.cells)

    @property
    def baseline(self) -> RowFolder:
        return self.row(self.protocol.baseline.name)

    @property
    def finished(self) -> list[RowFolder]:
        return [row for row in self.rows if row.finished]

    def row(self, name: str) -> RowFolder:
        return self.rows[self.protocol.cells.index(self.protocol.cell(name))]

    @cached_property
    def prompts(self) -> list[Prompt]:
        return run_prompts(self.protocol)

    @cached_property
    def batches(self) -> list[list[Prompt]]:
        size = self.protocol.batch
        return [self.prompts[start : start + size] for start in range(0, len(self.prompts), size)]

    def lists_its_prompts(self, row: RowFolder, made: Sequence[records.MadeImage]) -> bool:
        first = self.protocol.seed + self.protocol.cell(row.name).seed_offset
        wanted = [(each.index, each.text, each.class_index, first + each.index) for each in self.prompts]
        return [(each.index, each.prompt, each.class_index, each.seed) for each in made] == wanted

    @property
    def record(self) -> records.RunRecord:
        return _read_record(self.folder)

    def check(self) -> None:
        """Refuse a folder that belongs to another protocol or to something else."""
        if not (self.folder / RUN_FILE).exists():
            for path in self.folder.iterdir() if self.folder.is_dir() else ():
                if not is_hidden(path.name) and path.suffix != ".part":
                    said = f"is not empty and holds no run (there is {path.name!r})"
                    raise ElfattError(f"{self.folder} {said}; give a new folder.")
            return
        record, now = self.record, self.protocol.to_dict()
        if record.identity != self.protocol.identity:
            listed = "; ".join(differences(decisive(record.protocol), decisive(now))) or "the file was edited"
            remedy = _NEW_FOLDER.format(self.folder)
            raise ElfattError(f"{self.folder} holds a run of another specification ({listed}); {remedy}.")
        if record.protocol != now:  # a description or a printed figure was mended
            self.begin(record.environment)

    def check_environment(self, environment: Mapping[str, Any]) -> None:
        """Refuse to go on where images would come out differently."""
        begun = [self.protocol.cell(row.name) for row in self.rows if row.finished or row.batches_folder.is_dir()]
        if begun and (changed := records.same_images(self.record.environment, environment, begun)):
            said = f"was begun where images come out differently ({'; '.join(changed)})"
            raise ElfattError(f"{self.folder} {said}; go on there, or {_NEW_FOLDER.format(self.folder)}.")

    def begin(self, environment: Mapping[str, Any]) -> None:
        created = self.record.created if (self.folder / RUN_FILE).exists() else now()
        data = {"format": 1, "name": self.protocol.name, "identity": self.protocol.identity, "created": created}
        data |= {"protocol": self.protocol.to_dict(), "environment": dict(environment)}
        write_json(self.folder / RUN_FILE, data)

    @contextlib.contextmanager
    def writing(self) -> Iterator[bool]:
        """Hold the lock of the folder, in the first of several processes that work on a device."""
        first = bool(process_state(self.protocol.device).is_main_process)
        with clear_disk_errors(self.folder), folder_lock(self.folder) if first else contextlib.nullcontext():
            yield first

    def results(self) -> dict[str, Any]:
        """Return the rows with everything that was measured so far; what was not is None."""
        record, protocol = self.record, self.protocol
        remedy = "delete the file, and give the `eval run` command again"
        scores, times, peaks, costs = (
            records.read_data(self.folder / name, records.StageFile, remedy, record.identity) or {"rows": {}}
            for name in (SCORES_FILE, TIME_FILE, MEMORY_FILE, COST_FILE)
        )
        timing = {key: times[key] for key in ("measured", "environment", "note") if times.get(key)}
        rows = []
        for cell, row in zip(protocol.cells, self.rows, strict=True):
            score = scores["rows"].get(cell.name) or {"images": len(row.made_images()) if row.finished else None}
            rows.append(
                {
                    "cell": cell.name,
                    "label": cell.label,
                    "method": cell.method,
                    "peer": cell.peer or None,
                    "settings": cell.shown,
                    "role": cell.role,
                    **{key: score.get(key) for key in _SCORED},
                    "time": times["rows"].get(cell.name),
                    "memory": peaks["rows"].get(cell.name),
                    "cost": costs["rows"].get(cell.name),
                    "failed": row.failure,
                }
            )
        return {
            "format": FORMAT,
            "name": protocol.name,
            "description": " ".join(protocol.description.split()),
            "identity": record.identity,
            "created": record.created,
            "protocol": record.protocol,
            "environment": {**record.environment, **({"timing": timing} if timing else {})},
            "reference": scores.get("references"),
            "rows": records.without_intervals_of_few(rows),
            "published": record.protocol.get("published") or None,
        }

    def write_results(self) -> dict[str, Any]:
        results = self.results()
        write_json(self.folder / RESULTS_FILE, results)
        return results


def _read_record(folder: Path) -> records.RunRecord:
    record = read_typed(folder / RUN_FILE, records.RunRecord, _LOST)
    if record is None:
        raise ElfattError(f"{folder} holds no run ({RUN_FILE} is missing); give a folder that `eval run` has made.")
    return record


@contextlib.contextmanager
def clear_disk_errors(folder: Path) -> Iterator[None]:
    """Turn a full disk, or a place that is not a file or cannot be written, into one clear line."""
    try:
        yield
    except OSError as error:
        if not is_full(error) and not (error.filename and error.strerror):
            raise
        said, mend = f"{error.filename}: {error.strerror}", "mend that"
        if is_full(error):
            said, mend = f"no space left on the disk of {folder}", "make room"
        raise ElfattFailure(f"{said}; finished work is kept: {mend} and give the same command again.") from error
