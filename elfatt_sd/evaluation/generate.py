"""Generate the images of every row: the same latents for all, committed batch by batch, by one process or several.

Image `i` starts from noise that a CPU generator with seed `seed + i` draws in float32, whatever the batch size, the
device or the number of processes. The batches are fixed by the index (batch `b` holds images `b * batch` to
`(b + 1) * batch - 1`), and a batch counts only once its own list of hashes is in place; so a run that was killed goes
on with the very batches that an uninterrupted one would have made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import importlib
import inspect
import io
import itertools
import json
import random
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from elfatt_sd.config import ElfattError
from elfatt_sd.devices import is_out_of_memory
from elfatt_sd.evaluation import folder
from elfatt_sd.evaluation.environment import describe_environment, same_images, sha256_of_code
from elfatt_sd.evaluation.first_steps import exact_calls, first_steps, kept_calls
from elfatt_sd.evaluation.processes import check_shared, gathered, process_state
from elfatt_sd.evaluation.prompts import Prompt, build_prompts, load_labels
from elfatt_sd.evaluation.protocols import Cell, Protocol
from elfatt_sd.evaluation.reuse import take_over
from elfatt_sd.files import atomic_file, sha256_of_data, write_json
from elfatt_sd.optional import need

Value = TypeVar("Value")
_METHOD = (  # the modules that decide what a patched layer computes
    "attention",
    "cell_spread",
    "config",
    "layers",
    "merging",
    "ordering",
    "patch",
    "processor",
    "sampled",
    "schedule",
)
_LOG_SECONDS = 60.0  # between two lines of progress where there is no terminal


class BadImage(ElfattError):
    """An image that is black, of one colour, or not a number."""


def run_prompts(protocol: Protocol) -> list[Prompt]:
    """Return the prompts of each row's images, in the order of their indices.

    Raises:
        ElfattError: the labels cannot be read, or a null row would have seeds of another row.
    """
    labels = spread(load_labels(protocol.labels), protocol.classes)
    prompts = spread(build_prompts(labels, protocol.template, protocol.images_per_class), protocol.limit)
    offsets = sorted([0, *(cell.seed_offset for cell in protocol.cells if cell.role == "null")])
    for first, second in itertools.pairwise(offsets):
        if second - first < len(prompts):
            raise ElfattError(
                f"seed_offset={second} is not accepted; with {len(prompts)} images a row, give null rows offsets that "
                f"are {len(prompts)} or more above 0 and above each other."
            )
    return [dataclasses.replace(prompt, index=index) for index, prompt in enumerate(prompts)]


def spread(values: Sequence[Value], count: int) -> list[Value]:
    """Return so many of the values, in order: one drawn from each of `count` equal stretches, always the same.

    The draw keeps the choice from falling in step with lists that repeat, such as combinations of attributes. 0, or
    more than there are, returns all values.
    """
    if not 0 < count < len(values):
        return list(values)
    draw = random.Random(0).random
    return [values[int((index + draw()) * len(values) / count)] for index in range(count)]


def load_protocol_pipeline(protocol: Protocol, device: str | None = None) -> Any:
    """Load a protocol's pipeline with its scheduler, and without what would alter images (checker, watermark).

    Args:
        protocol: names model, dtype, scheduler and device.
        device: takes the place of the protocol's.

    Raises:
        ElfattError: the model cannot be loaded, or diffusers has no such scheduler.
    """
    from elfatt_sd.pipelines import load_pipeline

    pipe = load_pipeline(protocol.model, device=device or protocol.device, dtype=protocol.dtype)
    if protocol.scheduler != "stored":
        pipe.scheduler = _scheduler(protocol.scheduler, pipe.scheduler.config)
    for extra in ("safety_checker", "watermark"):
        if getattr(pipe, extra, None) is not None:
            setattr(pipe, extra, None)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _scheduler(name: str, stored: Any) -> Any:
    """Make a scheduler with the settings of the model's own; PLMS is PNDM without its Runge-Kutta start."""
    import diffusers

    plms = name == "PLMS"
    kind = getattr(diffusers, "PNDMScheduler" if plms else name, None)
    if not (isinstance(kind, type) and issubclass(kind, diffusers.SchedulerMixin)):
        raise ElfattError(
            f"scheduler={name!r} is not known; accepted: stored, PLMS, or a scheduler class of diffusers."
        )
    from_config: Any = kind.from_config
    return from_config(stored, **({"skip_prk_steps": True} if plms else {}))


@contextlib.contextmanager
def row_patch(pipe: Any, cell: Cell, seed: int = 0) -> Iterator[None]:
    """Patch a pipeline with a row's method for the length of a `with` block.

    Args:
        pipe: the pipeline.
        cell: the row.
        seed: seeds a peer that draws from the global state, which is put back afterwards.
    """
    if cell.peer:
        with _tomesd(pipe, cell, seed):
            yield
    elif cell.config().active:
        from elfatt_sd.patch import patched

        with patched(pipe, cell.config()):
            yield
    else:
        yield


@contextlib.contextmanager
def _tomesd(pipe: Any, cell: Cell, seed: int) -> Iterator[None]:
    """Run the peer's own patch; it forks its generator from the global one at the first call."""
    need("peer 'tomesd'", "tomesd")
    import tomesd

    options = {name: value for name, value in cell.settings.items() if name != "stride"}
    stride = cell.settings.get("stride", 2)
    devices = [pipe.device] if pipe.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        tomesd.apply_patch(pipe, sx=stride, sy=stride, **options)
        try:
            yield
        finally:
            tomesd.remove_patch(pipe)


def image_seed(protocol: Protocol, cell: Cell, index: int) -> int:
    """Return the seed of an image; the null row's differ from all others."""
    return protocol.seed + cell.seed_offset + index


def start_noise(pipe: Any, protocol: Protocol, seeds: Sequence[int]) -> tuple[Tensor, list[torch.Generator]]:
    """Draw the starting noise of some images.

    Returns:
        Latents `[n, channels, height / factor, width / factor]` in the pipeline's dtype, drawn in float32 on the CPU,
        and the generators, which go on to serve schedulers that add noise.
    """
    factor = pipe.vae_scale_factor
    shape = (pipe.unet.config.in_channels, protocol.height // factor, protocol.width // factor)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    latents = torch.stack([torch.randn(shape, generator=generator) for generator in generators])
    return latents.to(pipe.device, pipe.unet.dtype), generators


def make_images(pipe: Any, protocol: Protocol, prompts: Sequence[str], seeds: Sequence[int]) -> Tensor:
    """Run the pipeline on a batch.

    Args:
        pipe: the pipeline, patched or not.
        protocol: size, steps and guidance.
        prompts: one for each image.
        seeds: likewise.

    Returns:
        Images `[n, 3, height, width]`, floating in [0, 1], on the pipeline's device.
    """
    latents, generators = start_noise(pipe, protocol, seeds)
    output = pipe(
        prompt=list(prompts),
        height=protocol.height,
        width=protocol.width,
        num_inference_steps=protocol.steps,
        guidance_scale=protocol.guidance,
        latents=latents,
        generator=generators,
        output_type="pt",
    )
    images: Tensor = output.images
    return images


def to_uint8(images: Tensor) -> Tensor:
    """Round images in [0, 1] to `[n, height, width, 3]` uint8 on the CPU."""
    return (images.permute(0, 2, 3, 1).float() * 255).round().to(torch.uint8).cpu()  # half precision has no 255 levels


def check_images(images: Tensor, indices: Sequence[int]) -> None:
    """Refuse images that no working pipeline makes.

    Args:
        images: `[n, 3, height, width]` in [0, 1].
        indices: their numbers, for the message.

    Raises:
        BadImage: one holds NaN, is black, or has one colour only.
    """
    for index, image in zip(indices, images, strict=True):
        low, high = (float(value) for value in torch.aminmax(image.float()))
        if not (low > float("-inf") and high < float("inf")):
            raise BadImage(f"image {index} is not finite (NaN or infinity); try dtype='float32' or 'bfloat16'")
        if round(high * 255) == 0:
            raise BadImage(f"image {index} is black")
        if round(high * 255) == round(low * 255):
            raise BadImage(f"image {index} has the single value {high:.3f}")


def generate(
    run_dir: Path, protocol: Protocol, *, reuse: Sequence[Path] = (), show_progress: bool = True
) -> dict[str, str]:
    """Generate all images of a run that are not there yet; several processes share the batches.

    Args:
        run_dir: the run's folder; the caller holds its lock.
        protocol: what to generate.
        reuse: folders of other runs, whose rows are copied where they are the same.
        show_progress: draw a bar over all rows with the time left.

    Returns:
        The rows that failed, with the reason.

    Raises:
        ElfattError: the folder belongs to another specification or to other weights, or the model cannot be loaded.
    """
    need("an evaluation with rows of peers", *sorted(protocol.peers))
    state = process_state(protocol.device)
    check_shared(run_dir, "run folder", "give --out a folder that all machines share")
    folder.check_run(run_dir, protocol)
    if state.is_main_process:
        _tidy(run_dir, protocol)
    state.wait_for_everyone()
    items = run_prompts(protocol)
    pending = [cell for cell in protocol.cells if not folder.manifest_path(run_dir, cell).is_file()]
    if not pending:
        return {}
    device = str(state.device) if state.num_processes > 1 and protocol.device == "auto" else None
    pipe = load_protocol_pipeline(protocol, device)
    environment = image_environment(protocol, pipe)
    _check_processes(environment, pending)
    _record_run(run_dir, protocol, environment, write=state.is_main_process)
    if state.is_main_process:
        tell = functools.partial(print, file=sys.stderr) if show_progress else None
        take_over(run_dir, protocol, reuse, tell)
    state.wait_for_everyone()
    pending = [cell for cell in pending if not folder.manifest_path(run_dir, cell).is_file()]
    pending.sort(key=lambda cell: cell.role != "baseline")  # nothing can be said without it
    batches = [items[start : start + protocol.batch] for start in range(0, len(items), protocol.batch)]
    mine = list(enumerate(batches))[state.process_index :: state.num_processes]
    todo = {
        cell.name: [(number, batch) for number, batch in mine if not _batch_path(run_dir, cell, number).is_file()]
        for cell in pending
    }
    total = sum(len(batch) for share in todo.values() for _, batch in share)
    failures = {}
    shares = state.num_processes
    with _progress(total, shares=shares, shown=show_progress and state.is_main_process) as advance:
        for cell in pending:
            reasons = gathered(_generate_row(pipe, run_dir, protocol, cell, todo[cell.name], advance))
            reason = next(filter(None, reasons), None)
            if reason:
                failures[cell.name] = reason
            if state.is_main_process:
                _close_row(run_dir, cell, len(batches), reason)
            if reason and cell.role == "baseline":
                break
    state.wait_for_everyone()
    if state.is_main_process:
        shutil.rmtree(folder.first_steps_dir(run_dir), ignore_errors=True)
    return failures


def _generate_row(
    pipe: Any, run_dir: Path, protocol: Protocol, cell: Cell, batches: Sequence[tuple[int, list[Prompt]]], advance: Any
) -> str | None:
    """Make what is missing of this process's share of a row; return why the row failed, or None."""
    advance(0, cell.name)
    calls = kept_calls(protocol, cell)
    try:
        for number, batch in batches:
            _generate_batch(pipe, run_dir, protocol, cell, number, batch, calls)
            advance(len(batch), cell.name)
    except ElfattError as error:
        return str(error)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return f"out of memory at batch {protocol.batch}"
    return None


@torch.no_grad()
def _generate_batch(
    pipe: Any, run_dir: Path, protocol: Protocol, cell: Cell, number: int, batch: list[Prompt], calls: int
) -> None:
    """Make a batch, write its images, and then commit it by its list of hashes; `calls` as for `first_steps`."""
    seeds = [image_seed(protocol, cell, item.index) for item in batch]
    common = folder.first_steps_dir(run_dir) / f"{number:06d}.pt"
    with row_patch(pipe, cell, seeds[0]), first_steps(pipe, common, calls):
        images = make_images(pipe, protocol, [item.text for item in batch], seeds)
    check_images(images, [item.index for item in batch])
    lines = []
    for item, seed, pixels in zip(batch, seeds, to_uint8(images), strict=True):
        path = folder.image_path(run_dir, cell, item.index)
        digest = _write_png(path, pixels)
        entry = {
            "index": item.index,
            "file": f"images/{path.name}",
            "prompt": item.text,
            "class_index": item.class_index,
            "seed": seed,
            "sha256": digest,
        }
        lines.append(json.dumps(entry, ensure_ascii=False) + "\n")
    with atomic_file(_batch_path(run_dir, cell, number)) as file:
        file.write("".join(lines).encode())


def _write_png(path: Path, pixels: Tensor) -> str:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(buffer, format="PNG")
    with atomic_file(path) as file:
        file.write(buffer.getvalue())
    return hashlib.sha256(buffer.getvalue()).hexdigest()


def _batch_path(run_dir: Path, cell: Cell, number: int) -> Path:
    return folder.batches_dir(run_dir, cell) / f"{number:06d}.jsonl"


def _close_row(run_dir: Path, cell: Cell, batches: int, reason: str | None) -> None:
    """Join the lists of a finished row's batches into its manifest, or note why it failed."""
    if reason:
        write_json(folder.failure_path(run_dir, cell), {"reason": reason})
        return
    folder.failure_path(run_dir, cell).unlink(missing_ok=True)  # first: no finished row is ever said to have failed
    with atomic_file(folder.manifest_path(run_dir, cell)) as file:
        for number in range(batches):
            file.write(_batch_path(run_dir, cell, number).read_bytes())
    shutil.rmtree(folder.batches_dir(run_dir, cell), ignore_errors=True)


def _tidy(run_dir: Path, protocol: Protocol) -> None:
    """Remove what a killed process left behind: half-written files, lists that are joined already, steps of nothing."""
    for leftover in run_dir.rglob(".*.part"):
        leftover.unlink()
    for manifest in (run_dir / "cells").glob("*/manifest.jsonl"):
        shutil.rmtree(manifest.parent / "batches", ignore_errors=True)
    if not any(folder.is_begun(run_dir, cell) for cell in protocol.cells):  # they may be those of other weights
        shutil.rmtree(folder.first_steps_dir(run_dir), ignore_errors=True)


def _record_run(run_dir: Path, protocol: Protocol, environment: dict[str, Any], *, write: bool) -> None:
    """Write `run.json`, where all finished work was made as this environment would make it."""
    check_environment(run_dir, protocol, environment)
    if not write:
        return
    run = folder.read_run(run_dir) or {
        "format": folder.FORMAT,
        "name": protocol.name,
        "identity": protocol.identity,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "protocol": protocol.to_dict(),
    }
    write_json(run_dir / folder.RUN_FILE, {**run, "environment": environment})


def check_environment(run_dir: Path, protocol: Protocol, environment: dict[str, Any]) -> None:
    """Refuse to go on with a run where its images would come out differently.

    Args:
        run_dir: the run's folder.
        protocol: of the run.
        environment: what `image_environment` says here and now.

    Raises:
        ElfattError: weights, prompts, code, versions or device are not those that finished work was made with.
    """
    run = folder.read_run(run_dir)
    begun = [cell for cell in protocol.cells if folder.is_begun(run_dir, cell)]
    changed = same_images(run["environment"], environment, begun) if run else []
    if changed:
        raise ElfattError(
            f"{run_dir} was begun where images come out differently ({'; '.join(changed)}); "
            f"go on there, or {folder.new_folder(run_dir)}."
        )


def image_environment(protocol: Protocol, pipe: Any) -> dict[str, Any]:
    """Return, as plain data, all that decides a run's images beside its protocol.

    Args:
        protocol: of the run.
        pipe: its pipeline, not patched.

    Returns:
        What `describe_environment` and `code_hashes` say, and the hashes of the weights and of the prompts with their
        tokens.
    """
    items = run_prompts(protocol)
    prompts = [[item.text, item.class_index] for item in items]
    return {
        **describe_environment(pipe.device),
        "model_sha256": weights_sha256(pipe),
        "prompts_sha256": sha256_of_data([prompts, _tokens(pipe, ["", *(item.text for item in items)])]),
        **code_hashes(),
    }


_IMAGE_CODE = (
    load_protocol_pipeline,
    _scheduler,
    row_patch,
    _tomesd,
    image_seed,
    start_noise,
    make_images,
    to_uint8,
    exact_calls,
    first_steps,
)


@functools.cache
def code_hashes() -> dict[str, str]:
    """Return `code_sha256`, of what makes every image, and `method_sha256`, of what a patch computes.

    They are those of the code that this process has loaded, whatever becomes of its files later.
    """
    method = [importlib.import_module(f"elfatt_sd.{name}") for name in _METHOD]
    return {
        "code_sha256": sha256_of_code(inspect.getsource(part) for part in _IMAGE_CODE),
        "method_sha256": sha256_of_code(inspect.getsource(module) for module in method),
    }


def _tokens(pipe: Any, texts: Sequence[str]) -> list[Any]:
    """Return what a pipeline's tokenizers make of some texts: all of their files that counts."""
    tokenizers = [part for name, part in sorted(pipe.components.items()) if name.startswith("tokenizer")]
    options: dict[str, Any] = {"padding": "max_length", "truncation": True}
    return [part(list(texts), **options).input_ids for part in tokenizers if part is not None]


def weights_sha256(pipe: Any) -> str:
    """Return the hash of a pipeline's networks, weights and settings, and of its and its scheduler's settings."""
    digest = hashlib.sha256()
    networks = {name: part for name, part in sorted(pipe.components.items()) if isinstance(part, nn.Module)}
    for name, network in networks.items():
        for key, value in network.state_dict().items():
            digest.update(f"{name}.{key} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    parts = {**networks, "scheduler": pipe.scheduler, "pipeline": pipe}
    settings = {name: [type(part).__name__, _settings(part.config)] for name, part in parts.items()}
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _settings(config: Any) -> dict[str, Any]:
    """Return a part's settings, without where it was loaded from and by which version."""
    data = config.to_dict() if hasattr(config, "to_dict") else config
    return {key: value for key, value in data.items() if not key.startswith("_")}


def _check_processes(environment: Mapping[str, Any], cells: Sequence[Cell]) -> None:
    """Refuse processes of one launch that make different images; all of them must call this.

    Raises:
        ElfattError: on every process, with what differs on the first that does.
    """
    first, *others = gathered(environment)
    for number, other in enumerate(others, 1):
        if changed := same_images(first, other, cells):
            raise ElfattError(
                f"processes 0 and {number} would make different images ({'; '.join(changed)}); "
                "launch on machines that are alike."
            )


@contextlib.contextmanager
def _progress(total: int, *, shares: int = 1, shown: bool) -> Iterator[Any]:
    """Draw a bar over all rows; yields a function that takes the number of new images and the row's name.

    Of several processes only one draws, and knows of its own share alone.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    what = "images" if shares == 1 else f"images of process 1 of {shares}"
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(what),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    logged, told = shown and not console.is_terminal, 0.0
    # A batch can take minutes; from the usual 30 seconds no speed, and so no time left, would be known.
    bar = Progress(
        *columns,
        console=console,
        disable=not shown or logged,
        speed_estimate_period=3600,
        redirect_stdout=sys.stdout.isatty(),
    )
    with bar as progress:
        task = progress.add_task("generate", total=total)

        def advance(images: int, row: str) -> None:
            nonlocal told
            progress.update(task, advance=images, description=row)
            if logged and (not images or console.get_time() - told >= _LOG_SECONDS):  # a new row, or long silence
                told = console.get_time()
                done, seconds = progress.tasks[0].completed, progress.tasks[0].time_remaining
                left = "" if seconds is None else f", about {datetime.timedelta(seconds=seconds)} left"
                print(f"generate: {row}, {done:.0f} of {total} {what} done{left}", file=sys.stderr)

        yield advance
