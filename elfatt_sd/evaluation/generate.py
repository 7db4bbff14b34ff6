"""Generate the images of every row: the same latents for all, committed batch by batch, by one process or several.

The batches are fixed by the index: batch `b` holds images `b * batch` to `(b + 1) * batch - 1`. A batch counts only
once its own list of hashes is in place; so a run that was killed goes on with the batches that an uninterrupted one
would have made.
"""

from __future__ import annotations

import functools
import hashlib
import io
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from msgspec.structs import asdict
from PIL import Image

from elfatt_sd.drawing.studio import rows_of, tell_cut_prompts
from elfatt_sd.errors import ElfattError, is_out_of_memory, need
from elfatt_sd.evaluation.extraction import check_shared, gathered, process_state
from elfatt_sd.evaluation.images import (
    check_images,
    check_size,
    image_environment,
    image_seed,
    load_protocol_pipeline,
    make_images,
    row_patch,
    to_uint8,
)
from elfatt_sd.evaluation.prompts import Prompt
from elfatt_sd.evaluation.protocols import Cell, Protocol
from elfatt_sd.evaluation.records import MadeImage, RowCost, same_images
from elfatt_sd.evaluation.run import COST_FILE, RowFolder, RunFolder
from elfatt_sd.files import read_plain, write_file, write_json
from elfatt_sd.measure import progress_of
from elfatt_sd.patch import plan
from elfatt_sd.peers import packages_of

_DECISIVE = ("scheduler", "steps", "guidance", "height", "width", "frames", "negative_prompt", "dtype", "batch", "seed")


def generate(run: RunFolder, *, reuse: Sequence[RunFolder] = (), show_progress: bool = True) -> dict[str, str]:
    """Generate all images of a run that are not there yet; several processes share the batches."""
    need("an evaluation with rows of peers", *packages_of(run.protocol.peers))
    state = process_state(run.protocol.device)
    check_shared(run.folder, "run folder", "give --out a folder that all machines share")
    run.check()
    if state.is_main_process:  # what a killed process left: half-written files, lists that are joined already
        for leftover in run.folder.rglob(".*.part"):
            leftover.unlink()
        for row in run.finished:
            shutil.rmtree(row.batches_folder, ignore_errors=True)
    state.wait_for_everyone()
    pending = sorted((row for row in run.rows if not row.finished), key=lambda row: row is not run.baseline)
    if not pending:
        return {}
    device = str(state.device) if state.num_processes > 1 and run.protocol.device == "auto" else None
    pipe = load_protocol_pipeline(run.protocol, device)
    check_size(run.protocol, pipe)
    environment = image_environment(run.protocol, pipe)
    first, *others = gathered(environment)
    for number, other in enumerate(others, 1):
        if changed := same_images(first, other, [run.protocol.cell(row.name) for row in pending]):
            raise ElfattError(
                f"processes 0 and {number} would make different images ({'; '.join(changed)}); "
                "launch on machines that are alike."
            )
    run.check_environment(environment)
    if state.is_main_process:
        tell_cut_prompts(pipe, [run.protocol.negative_prompt, *(prompt.text for prompt in run.prompts)])
        run.begin(environment)
        write_cost(run, pipe)
        take_over(run, reuse, functools.partial(print, file=sys.stderr) if show_progress else lambda line: None)
    state.wait_for_everyone()
    failures = _make_rows(run, pipe, [row for row in pending if not row.finished], state, show_progress)
    state.wait_for_everyone()
    return failures


def _make_rows(
    run: RunFolder, pipe: Any, pending: Sequence[RowFolder], state: Any, show_progress: bool
) -> dict[str, str]:
    mine = list(enumerate(run.batches))[state.process_index :: state.num_processes]
    todo = {row.name: [each for each in mine if not row.has_batch(*each)] for row in pending}
    total, made = sum(len(batch) for share in todo.values() for _, batch in share), 0
    failures, short = dict[str, str](), f"out of memory at batch {run.protocol.batch}"
    shown = show_progress and state.is_main_process
    # of several processes only one shows it, and knows of its own share alone
    unit = "images" if state.num_processes == 1 else f"images of process 1 of {state.num_processes}"
    with progress_of(unit, every=60, title="generate: {},", shown=shown) as tell:
        for row in pending:
            own = None
            tell(row.name, made, total)
            try:
                for number, batch in todo[row.name]:
                    make_batch(run, pipe, row, number, batch)
                    made += len(batch)
                    tell(row.name, made, total)
            except Exception as error:
                if not isinstance(error, ElfattError) and not is_out_of_memory(error):
                    raise
                own = str(error) if isinstance(error, ElfattError) else short
            reason = next(filter(None, gathered(own)), None)
            if state.is_main_process:
                if reason:
                    write_json(row.failure_file, {"reason": reason})
                else:
                    row.finish(b"".join(row.batch_file(number).read_bytes() for number in range(len(run.batches))))
            if reason:
                failures[row.name] = reason
                if row is run.baseline:
                    break
    return failures


@torch.no_grad()
def make_batch(run: RunFolder, pipe: Any, row: RowFolder, number: int, batch: Sequence[Prompt]) -> None:
    cell = run.protocol.cell(row.name)
    seeds = [image_seed(run.protocol, cell, prompt.index) for prompt in batch]
    with row_patch(pipe, cell, seeds[0]):
        images = make_images(pipe, run.protocol, [prompt.text for prompt in batch], seeds)
    check_images(images, [prompt.index for prompt in batch])
    made = []
    for prompt, seed, pixels in zip(batch, seeds, to_uint8(images), strict=True):
        buffer, path = io.BytesIO(), row.image_file(prompt.index)
        rows = pixels.reshape(-1, *pixels.shape[-2:])  # the frames of a clip lie below each other
        Image.fromarray(rows.numpy()).save(buffer, format="PNG")
        write_file(path, buffer.getvalue())
        digest = hashlib.sha256(buffer.getvalue()).hexdigest()
        file = path.relative_to(row.folder).as_posix()
        made.append(MadeImage(prompt.index, file, prompt.text, prompt.class_index, seed, digest))
    write_file(row.batch_file(number), msgspec.json.Encoder().encode_lines(made))


def write_cost(run: RunFolder, pipe: Any = None) -> None:
    if not (run.folder / COST_FILE).is_file():
        write_json(run.folder / COST_FILE, costs(run, pipe))


def costs(run: RunFolder, pipe: Any = None) -> dict[str, Any]:
    """Work out the density of attention and the multiply-adds of an image, of each row but a peer's."""
    protocol, rows = run.protocol, dict[str, RowCost]()
    pipe = load_protocol_pipeline(protocol) if pipe is None else pipe
    frames = protocol.frames if protocol.frames > 1 else None
    calls = protocol.steps * rows_of(pipe, protocol.guidance)
    for cell in protocol.cells:
        if cell.peer:
            continue
        try:
            found = plan(pipe, cell.config(), height=protocol.height, width=protocol.width, frames=frames)
            before, after = found.multiply_adds_before, found.call.after
            density = found.multiply_adds_after / before if before else 1.0
            rows[cell.name] = RowCost(density, None if after is None else after * calls)
        except ElfattError as error:
            rows[cell.name] = RowCost(reason=str(error))
    return {"identity": run.record.identity, "rows": {name: asdict(cost) for name, cost in rows.items()}}


def take_over(run: RunFolder, others: Sequence[RunFolder], tell: Callable[[str], None]) -> None:
    """Copy the finished rows of other runs that this run would make again with the same bytes.

    Weights, prompts, code, versions and device must be those of this run, whose `run.json` is there, as far as they
    count for the row: rows of the untouched pipeline stay when a method's code changes.
    """
    for other in others:
        made = {_made(other.protocol, other.protocol.cell(row.name)): row for row in other.finished}
        for cell, row in zip(run.protocol.cells, run.rows, strict=True):
            source = made.get(_made(run.protocol, cell))
            if source is None or row.finished:
                continue
            different = same_images(other.record.environment, run.record.environment, [cell])
            images = [] if different else source.made_images()
            if not different and not run.lists_its_prompts(row, images):
                different = [f"{source.manifest} does not list this run's images"]
            if not different:
                for image in images:
                    path = source.image_file(image.index)
                    content = read_plain(path)
                    if hashlib.sha256(content).hexdigest() != image.sha256:
                        said = f"is not the image that was generated; row {row.name!r} cannot be reused"
                        raise ElfattError(f"{path} {said}.")
                    write_file(row.image_file(image.index), content)
                row.finish(source.manifest.read_bytes())
            said = f"not reused: {'; '.join(different)}" if different else "reused"
            tell(f"generate: row {row.name} of {other.folder} is {said}")


def _made(protocol: Protocol, cell: Cell) -> str:
    config: dict[str, Any] = cell.config().to_dict()
    del config["method"]  # a name
    return repr([[getattr(protocol, name) for name in _DECISIVE], config, cell.peer, cell.options, cell.seed_offset])
