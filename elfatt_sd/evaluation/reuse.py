"""Take rows over from other runs that made the same images, such as the untouched pipeline's."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from elfatt_sd.config import ElfattError
from elfatt_sd.evaluation.environment import same_images
from elfatt_sd.evaluation.protocols import Cell, Protocol
from elfatt_sd.evaluation.run import Row, Run
from elfatt_sd.files import read_plain, write_file

_DECISIVE = ("scheduler", "steps", "guidance", "height", "width", "frames", "negative_prompt", "dtype", "batch", "seed")


def take_over(run: Run, others: Sequence[Run], tell: Callable[[str], None] | None = None) -> dict[str, Path]:
    """Copy the finished rows of other runs that this run would make again with the same bytes.

    Weights, prompts, code, versions and device must be those of this run, whose `run.json` is there, as far as they
    count for the row: rows of the untouched pipeline stay when a method's code changes.
    """
    taken: dict[str, Path] = {}
    for other in others:
        made = {_made(other.protocol, row.cell): row for row in other.finished}
        for row in run.rows:
            source = made.get(_made(run.protocol, row.cell))
            if source is None or row.finished:
                continue
            different = same_images(other.record.environment, run.record.environment, [row.cell])
            if not different and not run.shows_its_prompts(row, source.made_images()):
                different = [f"{source.manifest} does not list this run's images"]
            if not different:
                _copy_row(source, row)
                taken[row.name] = other.folder
            if tell is not None:
                said = f"not reused: {'; '.join(different)}" if different else "reused"
                tell(f"generate: row {row.name} of {other.folder} is {said}")
    return taken


def _made(protocol: Protocol, cell: Cell) -> str:
    config: dict[str, Any] = cell.config().to_dict()
    del config["method"]  # a name
    return repr([[getattr(protocol, name) for name in _DECISIVE], config, cell.peer, cell.options, cell.seed_offset])


def _copy_row(source: Row, row: Row) -> None:
    for made in source.made_images():
        path = source.image_file(made.index)
        try:
            content = read_plain(path)
        except OSError as error:
            raise ElfattError(
                f"{path} cannot be read ({error.strerror}); row {row.name!r} cannot be reused."
            ) from error
        if hashlib.sha256(content).hexdigest() != made.sha256:
            raise ElfattError(f"{path} is not the image that was generated; row {row.name!r} cannot be reused.")
        write_file(row.image_file(made.index), content)
    row.finish(source.manifest.read_bytes())
