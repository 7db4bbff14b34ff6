"""Generate the images of every row: the same latents for all, committed batch by batch, by one process or several.

An image starts from noise that a CPU generator with its seed draws in float32, whatever the batch size, the device or
the number of processes. What else decides it is in `image_environment`: code, weights, prompts as tokens, machine.

The batches are fixed by the index: batch `b` holds images `b * batch` to `(b + 1) * batch - 1`. A batch counts only
once its own list of hashes is in place; so a run that was killed goes on with the batches that an uninterrupted one
would have made.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import io
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import asdict
from PIL import Image
from torch import Tensor, nn

from elfatt_sd import methods
from elfatt_sd.devices import describe_machine, standard_normal
from elfatt_sd.drawing.studio import (
    check_steps,
    dimensions_of,
    exact_size,
    fault_of,
    guidance_options,
    rows_of,
    tell_cut_prompts,
    warn_if_too_large,
)
from elfatt_sd.errors import ElfattError, is_out_of_memory, need
from elfatt_sd.evaluation.extraction import check_shared, gathered, process_state
from elfatt_sd.evaluation.prompts import Prompt, run_prompts
from elfatt_sd.evaluation.protocols import Cell, Protocol
from elfatt_sd.evaluation.records import MadeImage, RowCost, same_images
from elfatt_sd.evaluation.run import COST_FILE, RowFolder, RunFolder
from elfatt_sd.families import family_of, main_denoiser
from elfatt_sd.files import read_plain, sha256_of_code, sha256_of_data, write_file, write_json
from elfatt_sd.loading import load_pipeline, make_scheduler, set_steps
from elfatt_sd.measure import progress_of
from elfatt_sd.patch import patched, plan
from elfatt_sd.peers import packages_of, running
from elfatt_sd.plans import input_grid, taken

_DECISIVE = ("scheduler", "steps", "guidance", "height", "width", "frames", "negative_prompt", "dtype", "batch", "seed")


def generate(run: RunFolder, *, reuse: Sequence[RunFolder] = (), show_progress: bool = True) -> dict[str, str]:
    """Generate all images of a run that are not there yet; several processes share the batches."""
    need("an evaluation with rows of peers", *packages_of(run.protocol.peers))
    state = process_state(run.protocol.device)
    check_shared(run.folder, "run folder", "give --out a folder that all machines share")
    run.check()
    if state.is_main_process:
        for leftover in run.folder.rglob(".*.part"):  # what a killed process had half written
            leftover.unlink()
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
            said = f"processes 0 and {number} would make different images ({'; '.join(changed)})"
            raise ElfattError(f"{said}; launch on machines that are alike.")
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
    # of several processes only one shows it, and knows of its own share alone
    unit = "images" if state.num_processes == 1 else f"images of process 1 of {state.num_processes}"
    with progress_of(unit, every=60, title="generate: {},", shown=show_progress and state.is_main_process) as tell:
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
        Image.fromarray(pixels.reshape(-1, *pixels.shape[-2:]).numpy()).save(buffer, format="PNG")  # clips: tall
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
    frames = protocol.frames if makes_clips(pipe) else None
    set_steps(pipe.scheduler, protocol.steps)
    steps = len(pipe.scheduler.timesteps)
    calls = steps * rows_of(pipe, protocol.guidance, protocol.negative_prompt or None)
    for cell in [each for each in protocol.cells if not each.peer]:
        try:
            config = cell.config()
            found = plan(pipe, config, height=protocol.height, width=protocol.width, frames=frames, steps=steps)
            before, after = found.multiply_adds_before, found.call.after
            density = found.multiply_adds_after / before if before else 1.0
            rows[cell.name] = RowCost(None if config.reuse else density, None if after is None else after * calls)
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
                for image in images:  # the scores tell which of them was altered
                    write_file(row.image_file(image.index), read_plain(source.image_file(image.index)))
                row.finish(source.manifest.read_bytes())
            said = f"not reused: {'; '.join(different)}" if different else "reused"
            tell(f"generate: row {row.name} of {other.folder} is {said}")


def _made(protocol: Protocol, cell: Cell) -> str:
    config: dict[str, Any] = cell.config().to_dict()
    del config["method"]  # a name
    return repr([[getattr(protocol, name) for name in _DECISIVE], config, cell.peer, cell.options, cell.seed_offset])


# What decides what a patched layer computes, below the package's folder: modules, and folders of them.
_METHOD = ("config.py", "patch.py", "phases.py", "attention/*.py", "families/*.py", "methods/*.py", "runtime/*.py")
denoiser = main_denoiser


def check_size(protocol: Protocol, pipe: Any) -> None:
    """Refuse a size or frames that a pipeline cannot draw, and warn of a batch that is estimated not to fit."""
    dimensions_of(pipe).check(protocol.height, protocol.width)
    input_grid(pipe, protocol.height, protocol.width, protocol.frames)
    batches = [protocol.batch]
    if pipe.device.type == "cpu":  # a GPU's memory that runs out in timing is a result; a CPU's takes the machine down
        batches += [protocol.time.batch] if protocol.time else []
        batches += protocol.memory.batches if protocol.memory else []
    size, rows = (protocol.height, protocol.width), rows_of(pipe, protocol.guidance, protocol.negative_prompt or None)
    warn_if_too_large(pipe, *size, rows=rows, batch=max(batches), frames=protocol.frames)


def load_protocol_pipeline(protocol: Protocol, device: str | None = None) -> Any:
    """Load a protocol's pipeline with its scheduler, and without what would alter images (checker, watermark)."""
    place = device or protocol.device
    pipe = load_pipeline(protocol.model, device=place, dtype=protocol.dtype, variant=protocol.variant or None)
    if protocol.scheduler != "stored":
        pipe.scheduler = make_scheduler("pndm" if protocol.scheduler == "PLMS" else protocol.scheduler, pipe.scheduler)
    for extra in ("safety_checker", "watermark"):
        if getattr(pipe, extra, None) is not None:
            setattr(pipe, extra, None)
    check_steps(pipe, protocol.steps)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@contextlib.contextmanager
def row_patch(pipe: Any, cell: Cell, seed: int = 0) -> Iterator[None]:
    with contextlib.ExitStack() as undo:
        if cell.peer:
            undo.enter_context(_seeded(pipe, seed))
            undo.enter_context(running(pipe, cell.peer, cell.options))
        if cell.patched:
            undo.enter_context(patched(pipe, cell.config()))
        yield


@contextlib.contextmanager
def _seeded(pipe: Any, seed: int) -> Iterator[None]:
    """Seed the global generators, and put them back afterwards; tomesd forks its own from them at the first call."""
    own = random.getstate()
    kind = pipe.device.type
    forks = hasattr(getattr(torch, kind, None), "get_rng_state_all")  # CUDA, ROCm, XPU
    with torch.random.fork_rng([pipe.device] if forks else [], device_type=kind if forks else "cuda"):
        torch.manual_seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(own)


def image_seed(protocol: Protocol, cell: Cell, index: int) -> int:
    return protocol.seed + cell.seed_offset + index


def start_noise(pipe: Any, protocol: Protocol, seeds: Sequence[int]) -> dict[str, Any]:
    """Draw the starting noise of some images, as arguments of the pipeline's call."""
    if family_of(denoiser(pipe)).text or makes_clips(pipe):
        return {"generator": [torch.Generator().manual_seed(seed) for seed in seeds]}
    factor = pipe.vae_scale_factor
    shape = (denoiser(pipe).config.in_channels, protocol.height // factor, protocol.width // factor)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    latents = torch.stack([standard_normal(shape, generator) for generator in generators])
    return {"latents": latents.to(pipe.device, denoiser(pipe).dtype), "generator": generators}


def makes_clips(pipe: Any) -> bool:
    return "num_frames" in taken(pipe)


def make_images(pipe: Any, protocol: Protocol, prompts: Sequence[str], seeds: Sequence[int]) -> Tensor:
    negative = [protocol.negative_prompt] * len(prompts) if protocol.negative_prompt else None
    clips = {"num_frames": protocol.frames} if makes_clips(pipe) else {}
    output = pipe(
        prompt=list(prompts),
        num_inference_steps=protocol.steps,
        output_type="pt",
        **guidance_options(pipe, protocol.guidance, negative),
        **clips,
        **start_noise(pipe, protocol, seeds),
        **exact_size(pipe, protocol.height, protocol.width),
    )
    images: Tensor = output.frames if clips else output.images
    made = images.shape[1] if clips else 1
    if made != protocol.frames:
        raise ElfattError(f"frames={protocol.frames} is not accepted; {type(pipe).__name__} makes {made}.")
    return images[:, 0] if clips and made == 1 else images


def to_uint8(images: Tensor) -> Tensor:
    """Round images `[..., 3, height, width]` in [0, 1] to `[..., height, width, 3]` uint8 on the CPU."""
    return (images.movedim(-3, -1).float() * 255).round().to(torch.uint8).cpu()  # half precision has no 255 levels


def check_images(images: Tensor, indices: Sequence[int]) -> None:
    """Refuse images that no working pipeline makes."""
    for index, image in zip(indices, images.movedim(-3, -1), strict=True):
        if fault := fault_of(image.float().cpu().numpy() * 255):
            raise ElfattError(f"image {index} {fault}")


_LOADING = (denoiser, load_protocol_pipeline, make_scheduler, row_patch, _seeded, running)
_DRAWING = (image_seed, start_noise, makes_clips, make_images, to_uint8)


def image_environment(protocol: Protocol, pipe: Any) -> dict[str, Any]:
    """Return, as plain data, all that decides a run's images besides its protocol."""
    items = run_prompts(protocol)
    prompts = [[item.text, item.class_index] for item in items]
    tokens = []
    for name, part in sorted(pipe.components.items()):
        if name.startswith("tokenizer") and part is not None:
            short = part.model_max_length <= 4096  # others, of language models, fill up as far as memory goes
            options: dict[str, Any] = {"padding": "max_length", "truncation": True} if short else {}
            tokens.append(part(["", *(item.text for item in items)], **options).input_ids)
    return {
        **describe_machine(pipe.device),
        "model_sha256": weights_sha256(pipe),
        "prompts_sha256": sha256_of_data([prompts, tokens]),
        **code_hashes(),
    }


@functools.cache
def code_hashes() -> dict[str, str]:
    """Return `code_sha256`, of what makes every image, and `method_sha256`, of what a patch computes.

    They are those of the code as it is at the first call, whatever becomes of its files later.
    """
    files = [path for pattern in _METHOD for path in sorted(Path(__file__).parents[1].glob(pattern))]
    kinds = {kind.__module__ for kind in methods.attentions().values()}  # also those that others registered
    others = [sys.modules[name] for name in sorted(kinds) if not name.startswith("elfatt_sd.")]
    method = [path.read_text(encoding="utf-8") for path in files] + [inspect.getsource(other) for other in others]
    return {
        "code_sha256": sha256_of_code(inspect.getsource(part) for part in (*_LOADING, *_DRAWING)),
        "method_sha256": sha256_of_code(method),
    }


def weights_sha256(pipe: Any) -> str:
    """Return the hash of a pipeline's networks, weights and settings, and of its and its scheduler's settings."""
    digest = hashlib.sha256()
    networks = {name: part for name, part in sorted(pipe.components.items()) if isinstance(part, nn.Module)}
    for name, network in networks.items():
        for key, value in network.state_dict().items():
            digest.update(f"{name}.{key} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    settings = {}
    for name, part in {**networks, "scheduler": pipe.scheduler, "pipeline": pipe}.items():
        config = part.config.to_dict() if hasattr(part.config, "to_dict") else part.config
        settings[name] = [type(part).__name__, {key: value for key, value in config.items() if not key.startswith("_")}]
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    return digest.hexdigest()
