"""What of a machine and its versions can change images, and which kernels a row attends with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from elfatt_sd.evaluation.protocols import Cell
from elfatt_sd.peers import PEERS

# What can change an image: of every row, and on CUDA. A thread more or less sums in another order on the CPU.
_DECISIVE = ("device", "attention_backends", "model_sha256", "prompts_sha256", "code_sha256")
_DECISIVE_CUDA = ("runtime", "cudnn", "tf32", "cudnn_tf32")
_DECISIVE_PACKAGES = ("torch", "diffusers", "transformers")
_KERNELS = {  # the package that an attention backend comes from
    "auto": "flash-attn",
    "flash": "flash-attn",
    "flash_hub": "kernels",
    "_flash_3": "flash-attn-3",
    "sage": "sageattention",
    "xformers": "xformers",
}


def same_images(before: Mapping[str, Any], now: Mapping[str, Any], cells: Iterable[Cell]) -> list[str]:
    """List what differs between two environments so that images could differ too."""
    rows = list(cells)
    old, new = ({key: value for cell in rows for key, value in _decisive(each, cell).items()} for each in (before, now))
    return [f"{key}: {old[key]} there, {new[key]} here" for key in new if old[key] != new[key]]


def _decisive(environment: Mapping[str, Any], cell: Cell) -> dict[str, Any]:
    config, cuda = cell.config(), environment.get("cuda") or {}
    packages = [*_DECISIVE_PACKAGES, *([PEERS[cell.peer].package or "diffusers"] if cell.peer else [])]
    found = {key: environment.get(key) for key in _DECISIVE}
    found |= {key: cuda.get(key) for key in _DECISIVE_CUDA}
    found["cpu_threads"] = None if cuda else environment.get("cpu_threads")
    if cell.patched:
        found["method_sha256"] = environment.get("method_sha256")
        packages += [_KERNELS[config.attention_backend]] if config.attention_backend in _KERNELS else []
    installed = environment.get("packages", {})
    return found | {name: installed.get(name) for name in packages}


def attention_kernels(pipe: Any, cell: Cell) -> list[str]:
    """Return what a row's layers attend with: `native` (torch's fused attention), `flash-attn` or another backend.

    A row without a patch, and a peer's, has torch's; of a patch, what its approximations use.
    """
    import torch

    from elfatt_sd import attention
    from elfatt_sd.choosing import choose_layers
    from elfatt_sd.evaluation.images import denoiser
    from elfatt_sd.families import find_denoisers
    from elfatt_sd.layer_state import rounded

    config = cell.config()
    if not cell.patched:
        return ["native"]
    if config.attention_backend != "auto":
        return ["flash-attn" if config.attention_backend == "flash" else config.attention_backend]
    if all(phase.exact or phase.attention.needs_sums for phase in config.all_phases):
        return ["native"]
    dtype = torch.float32 if config.fp32_logits else denoiser(pipe).dtype
    phases = [phase for phase in config.all_phases if not phase.exact]
    layers = [layer.attention for _, chosen in choose_layers(find_denoisers(pipe), config).values() for layer in chosen]
    sizes = {layer.inner_dim // layer.heads for layer in layers}
    queries = [torch.empty(0, size, device=pipe.device, dtype=dtype) for size in sizes]
    taken = {attention.flash_takes(rounded(query, phase)) for query in queries for phase in phases}
    return sorted({"flash-attn" if each else "native" for each in taken})
