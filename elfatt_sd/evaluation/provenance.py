"""What decides a run's images besides its protocol: code, weights, prompts as the tokenizers read them, machine."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import torch
from torch import nn

from elfatt_sd import families, methods, peers
from elfatt_sd.attention import triton as kernels
from elfatt_sd.devices import describe_machine
from elfatt_sd.evaluation import images
from elfatt_sd.evaluation.prompts import run_prompts
from elfatt_sd.evaluation.protocols import Protocol
from elfatt_sd.files import sha256_of_code, sha256_of_data, sha256_of_file, visible

_METHOD = (  # the modules that decide what a patched layer computes, besides the attentions and the families
    "attention.joint",
    "attention.merging",
    "attention.ordering",
    "attention.softmax",
    "config",
    "patch",
    "phases",
    "runtime.call",
    "runtime.denoiser",
    "runtime.joint_processor",
    "runtime.layer",
    "runtime.memory",
    "runtime.processor",
    "runtime.schedule",
)
_LONGEST = 4096  # tokens
_IMAGE_CODE = (
    images.denoiser,
    images.load_protocol_pipeline,
    images._scheduler,
    images.row_patch,
    images._seeded,
    peers.running,
    images.image_seed,
    images.start_noise,
    images.makes_clips,
    images.make_images,
    images.to_uint8,
)


def image_environment(protocol: Protocol, pipe: Any) -> dict[str, Any]:
    """Return, as plain data, all that decides a run's images besides its protocol."""
    items = run_prompts(protocol)
    prompts = [[item.text, item.class_index] for item in items]
    file = protocol.prompts.path if protocol.prompts else None
    return {
        **describe_machine(pipe.device),
        "model_sha256": weights_sha256(pipe),
        "prompts_sha256": sha256_of_data([prompts, _tokens(pipe, ["", *(item.text for item in items)])]),
        **({} if file is None else {"prompts_file": {"name": file.name, "sha256": sha256_of_file(file)}}),
        **code_hashes(),
    }


@functools.cache
def code_hashes() -> dict[str, str]:
    """Return `code_sha256`, of what makes every image, and `method_sha256`, of what a patch computes.

    They are those of the code that this process has loaded, whatever becomes of its files later.
    """
    packages = [
        f"{package.__name__}.{found.name}"
        for package in (methods, families)
        for found in iter_modules(package.__path__)
    ]
    kinds = {kind.__module__ for kind in methods.attentions().values()}  # also those that others registered
    names = sorted({f"elfatt_sd.{name}" for name in _METHOD}.union(packages, kinds))
    method = [importlib.import_module(name) for name in names]
    sources = [path.read_text(encoding="utf-8") for path in visible(Path(kernels.__file__).parent.glob("*.py"))]
    return {
        "code_sha256": sha256_of_code(inspect.getsource(part) for part in _IMAGE_CODE),
        "method_sha256": sha256_of_code([*map(inspect.getsource, method), *sources]),
    }


def _tokens(pipe: Any, texts: Sequence[str]) -> list[Any]:
    tokenizers = [part for name, part in sorted(pipe.components.items()) if name.startswith("tokenizer")]
    found = []
    for part in tokenizers:
        if part is not None:
            short = part.model_max_length <= _LONGEST  # others, of language models, fill up as far as memory goes
            options: dict[str, Any] = {"padding": "max_length", "truncation": True} if short else {}
            found.append(part(list(texts), **options).input_ids)
    return found


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
    data = config.to_dict() if hasattr(config, "to_dict") else config
    return {key: value for key, value in data.items() if not key.startswith("_")}
