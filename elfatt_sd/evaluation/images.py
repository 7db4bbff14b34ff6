"""Make images: the pipeline of a protocol, patched as a row says, from noise that depends on the seed alone.

An image starts from noise that a CPU generator with its seed draws in float32, whatever the batch size, the device or
the number of processes. What else decides it is in `image_environment`: code, weights, prompts as tokens, machine.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from elfatt_sd import methods
from elfatt_sd.devices import describe_machine, standard_normal
from elfatt_sd.drawing.pictures import fault_of
from elfatt_sd.drawing.studio import (
    check_steps,
    dimensions_of,
    exact_size,
    guidance_options,
    rows_of,
    taken,
    warn_if_too_large,
)
from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.prompts import run_prompts
from elfatt_sd.evaluation.protocols import Cell, Protocol
from elfatt_sd.families import family_of, main_denoiser
from elfatt_sd.files import sha256_of_code, sha256_of_data, sha256_of_file
from elfatt_sd.loading import load_pipeline, make_scheduler
from elfatt_sd.patch import patched
from elfatt_sd.peers import running
from elfatt_sd.plans import input_grid

# What decides what a patched layer computes, below the package's folder: modules, and folders of them.
_METHOD = ("config.py", "patch.py", "phases.py", "attention/*.py", "families/*.py", "methods/*.py", "runtime/*.py")


denoiser = main_denoiser


def check_size(protocol: Protocol, pipe: Any) -> None:
    """Refuse a size or frames that a pipeline cannot draw, and warn of a batch that is estimated not to fit."""
    dimensions_of(pipe).check(protocol.height, protocol.width)
    if makes_clips(pipe):
        input_grid(pipe, protocol.height, protocol.width, protocol.frames)
    elif protocol.frames > 1:
        raise ElfattError(f"frames={protocol.frames} is not accepted; {type(pipe).__name__} makes images, of 1 frame.")
    batches = [protocol.batch]
    if pipe.device.type == "cpu":  # a GPU's memory that runs out in timing is a result; a CPU's takes the machine down
        batches += [protocol.time.batch] if protocol.time else []
        batches += protocol.memory.batches if protocol.memory else []
    size, rows = (protocol.height, protocol.width), rows_of(pipe, protocol.guidance)
    warn_if_too_large(pipe, *size, rows=rows, batch=max(batches), frames=protocol.frames)


def load_protocol_pipeline(protocol: Protocol, device: str | None = None) -> Any:
    """Load a protocol's pipeline with its scheduler, and without what would alter images (checker, watermark)."""
    place = device or protocol.device
    pipe = load_pipeline(protocol.model, device=place, dtype=protocol.dtype, variant=protocol.variant or None)
    if protocol.scheduler != "stored":
        name = "pndm" if protocol.scheduler == "PLMS" else protocol.scheduler
        pipe.scheduler = make_scheduler(name, pipe.scheduler)
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


_IMAGE_CODE = (
    denoiser,
    load_protocol_pipeline,
    make_scheduler,
    row_patch,
    _seeded,
    running,
    image_seed,
    start_noise,
    makes_clips,
    make_images,
    to_uint8,
)


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
    found: dict[str, Any] = {
        **describe_machine(pipe.device),
        "model_sha256": weights_sha256(pipe),
        "prompts_sha256": sha256_of_data([prompts, tokens]),
        **code_hashes(),
    }
    if protocol.prompts:
        file = protocol.prompts.path
        found["prompts_file"] = {"name": file.name, "sha256": sha256_of_file(file)}
    return found


@functools.cache
def code_hashes() -> dict[str, str]:
    """Return `code_sha256`, of what makes every image, and `method_sha256`, of what a patch computes.

    They are those of the code as it is at the first call, whatever becomes of its files later.
    """
    package = Path(__file__).parents[1]
    files = [path for pattern in _METHOD for path in sorted(package.glob(pattern))]
    kinds = {kind.__module__ for kind in methods.attentions().values()}  # also those that others registered
    others = [sys.modules[name] for name in sorted(kinds) if not name.startswith("elfatt_sd.")]
    method = [path.read_text(encoding="utf-8") for path in files] + [inspect.getsource(other) for other in others]
    return {
        "code_sha256": sha256_of_code(inspect.getsource(part) for part in _IMAGE_CODE),
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
    parts = {**networks, "scheduler": pipe.scheduler, "pipeline": pipe}
    settings = {}
    for name, part in parts.items():
        config = part.config.to_dict() if hasattr(part.config, "to_dict") else part.config
        shown = {key: value for key, value in config.items() if not key.startswith("_")}
        settings[name] = [type(part).__name__, shown]
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    return digest.hexdigest()
