"""Take rows over from other runs that made the very same images, such as the untouched pipeline's."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from elfatt_sd.config import ElfattError
from elfatt_sd.evaluation import folder
from elfatt_sd.evaluation.environment import same_images
from elfatt_sd.evaluation.protocols import Cell, Protocol
from elfatt_sd.files import atomic_file

_DECISIVE = ("scheduler", "steps", "guidance", "height", "width", "dtype", "batch", "seed")


def take_over(
    run_dir: Path, protocol: Protocol, others: Sequence[Path], tell: Callable[[str], None] | None = None
) -> dict[str, Path]:
    """Copy the finished rows of other runs that this run would make again with the same bytes.

    Weights, prompts, code, versions and device must be those of this run, whose `run.json` is there, as far as they
    count for the row: rows of the untouched pipeline stay when a method's code changes.

    Args:
        run_dir: the run's folder; the caller holds its lock.
        protocol: of the run.
        others: folders of runs.
        tell: gets a line for each row that is taken over, and one for each that would be but for what it was made with.

    Returns:
        Where each row that was taken over comes from.

    Raises:
        ElfattError: one of the folders holds no run, or an image there is not what it was.
    """
    own = folder.run_data(run_dir)
    taken: dict[str, Path] = {}
    for other in others:
        found = folder.run_data(other)
        there = Protocol.from_dict(found["protocol"])
        made = {_made(there, cell): cell for cell in there.cells if folder.manifest_path(other, cell).is_file()}
        for cell in protocol.cells:
            source = made.get(_made(protocol, cell))
            if source is None or folder.manifest_path(run_dir, cell).is_file():
                continue
            different = same_images(found["environment"], own["environment"], [cell])
            if not different:
                _copy_row(other, source, run_dir, cell)
                taken[cell.name] = other
            if tell is not None:
                said = f"not reused: {'; '.join(different)}" if different else "reused"
                tell(f"generate: row {cell.name} of {other} is {said}")
    return taken


def _made(protocol: Protocol, cell: Cell) -> str:
    """Return all that decides a row's images beside the environment, as text."""
    config: dict[str, Any] = cell.config().to_dict()
    del config["method"]  # a name
    return repr([[getattr(protocol, name) for name in _DECISIVE], config, cell.peer, cell.seed_offset])


def _copy_row(other: Path, source: Cell, run_dir: Path, cell: Cell) -> None:
    for entry in folder.read_manifest(other, source):
        path = folder.image_path(other, source, entry["index"])
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ElfattError(
                f"{path} cannot be read ({error.strerror}); row {cell.name!r} cannot be reused."
            ) from error
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            raise ElfattError(f"{path} is not the image that was generated; row {cell.name!r} cannot be reused.")
        with atomic_file(folder.image_path(run_dir, cell, entry["index"])) as file:
            file.write(content)
    folder.failure_path(run_dir, cell).unlink(missing_ok=True)
    with atomic_file(folder.manifest_path(run_dir, cell)) as file:
        file.write(folder.manifest_path(other, source).read_bytes())
