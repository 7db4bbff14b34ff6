"""The machine and the versions: what a figure depends on beside the protocol; and when the machine is too small."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

import elfatt_sd
from elfatt_sd import attention
from elfatt_sd.allocation import keeps_freed_memory
from elfatt_sd.devices import cpu_name, device_name, proc_value
from elfatt_sd.evaluation.protocols import Cell
from elfatt_sd.files import sha256_of_data

_PACKAGES = (
    "torch",
    "diffusers",
    "transformers",
    "accelerate",
    "tomesd",
    "torchmetrics",
    "torch-fidelity",
    "torchvision",
    "numpy",
    "pillow",
    "flash-attn",
    "flash-attn-3",
    "kernels",
    "sageattention",
    "xformers",
)
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


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Return versions, processor, accelerator, clocks and attention backends as plain data.

    Args:
        device: the device that the pipeline runs on.
    """
    return {
        "elfatt_sd": elfatt_sd.__version__,
        "commit": commit_of(Path(elfatt_sd.__file__).parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "device": device_name(device),
        "cpu": cpu_name(),
        "cpu_cores": os.cpu_count(),
        "cpu_threads": torch.get_num_threads(),
        "keeps_freed_memory": keeps_freed_memory(),
        "ram_gib": _ram_gib(),
        "cuda": _cuda(device) if device.type == "cuda" else None,
        "attention_backends": attention_backends(device),
    }


def same_images(before: Mapping[str, Any], now: Mapping[str, Any], cells: Iterable[Cell]) -> list[str]:
    """List what differs between two environments so that images could differ too.

    Args:
        before: an environment, as a run's file has it.
        now: another.
        cells: the rows in question; the method's code counts for those that it patches, a package where it is used.
    """
    rows = list(cells)
    old, new = ({key: value for cell in rows for key, value in _decisive(each, cell).items()} for each in (before, now))
    return [f"{key}: {old[key]} there, {new[key]} here" for key in new if old[key] != new[key]]


def _decisive(environment: Mapping[str, Any], cell: Cell) -> dict[str, Any]:
    """Return what of an environment can change a row's images."""
    config, cuda = cell.config(), environment.get("cuda") or {}
    packages = [*_DECISIVE_PACKAGES, *([cell.peer] if cell.peer else [])]
    found = {key: environment.get(key) for key in _DECISIVE}
    found |= {key: cuda.get(key) for key in _DECISIVE_CUDA}
    found["cpu_threads"] = None if cuda else environment.get("cpu_threads")
    if config.active and not cell.peer:
        found["method_sha256"] = environment.get("method_sha256")
        packages += [_KERNELS[config.attention_backend]] if config.attention_backend in _KERNELS else []
    installed = environment.get("packages", {})
    return found | {name: installed.get(name) for name in packages}


def sha256_of_code(sources: Iterable[str]) -> str:
    """Return the hash of what Python code does: its comments, docstrings and layout do not count."""
    return sha256_of_data([ast.unparse(_without_docstrings(ast.parse(source))) for source in sources])


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return tree


def read_clocks(device: torch.device) -> dict[str, Any]:
    """Return the present clocks in MHz, and temperature and power where they can be read."""
    if device.type != "cuda":
        return {"cpu_mhz": _cpu_mhz()}
    fields = ("clocks.sm", "clocks.mem", "clocks.max.sm", "temperature.gpu", "power.draw")
    card = f"GPU-{torch.cuda.get_device_properties(device).uuid}"  # its index would ignore CUDA_VISIBLE_DEVICES
    query = _first_line(
        "nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", f"--id={card}"
    )
    return dict(zip(fields, (value.strip() for value in query.split(",")), strict=False)) if query else {}


def attention_backends(device: torch.device) -> dict[str, Any]:
    """Return which kernels torch's fused attention may choose from on a device."""
    if device.type != "cuda":
        return {"scaled_dot_product_attention": ["flash (CPU)", "math"]}
    switches: Any = torch.backends.cuda
    allowed = {
        "flash": switches.flash_sdp_enabled(),
        "efficient": switches.mem_efficient_sdp_enabled(),
        "cudnn": switches.cudnn_sdp_enabled(),
        "math": switches.math_sdp_enabled(),
    }
    return {"scaled_dot_product_attention": [name for name, on in allowed.items() if on]}


def attention_kernels(pipe: Any, cell: Cell) -> list[str]:
    """Return what a row's layers attend with: `native` (torch's fused attention), `flash-attn` or another backend.

    A row without a patch, and a peer's, has torch's; of a patch, what its approximations use.

    Args:
        pipe: the row's pipeline, patched or not.
        cell: the row.
    """
    from elfatt_sd.families import find_denoisers
    from elfatt_sd.patch import choose_layers

    config = cell.config()
    if cell.peer or not config.active:
        return ["native"]
    if config.attention_backend != "auto":
        return ["flash-attn" if config.attention_backend == "flash" else config.attention_backend]
    if all(phase.exact or phase.attention.needs_sums for phase in config.phases):
        return ["native"]
    dtype = torch.float32 if config.fp32_logits else pipe.unet.dtype
    layers = [layer.attention for _, chosen in choose_layers(find_denoisers(pipe), config).values() for layer in chosen]
    queries = [torch.empty(0, layer.inner_dim // layer.heads, device=pipe.device, dtype=dtype) for layer in layers]
    return sorted({"flash-attn" if attention.flash_takes(query) else "native" for query in queries})


def commit_of(folder: Path) -> str | None:
    """Return the commit that the files in a folder are of, with `+changes` where they are not as it has them.

    None where no repository tracks them: one that merely lies around an environment's packages says nothing of them.
    """
    git = ("git", "--no-optional-locks", "-C", str(folder))
    if _first_line(*git, "ls-files") is None:
        return None
    commit = _first_line(*git, "rev-parse", "HEAD")
    changed = _first_line(*git, "status", "--porcelain", "--", ".")
    return f"{commit}+changes" if commit and changed else commit


def short_commit(commit: str | None) -> str:
    """Return twelve digits of what `commit_of` returned, with `+changes` where it has that; nothing for None."""
    digest, plus, changes = (commit or "").partition("+")
    return digest[:12] + plus + changes


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda(device: torch.device) -> dict[str, Any]:
    cudnn: Any = torch.backends.cudnn
    properties = torch.cuda.get_device_properties(device)
    return {
        "runtime": torch.version.cuda,
        "cudnn": cudnn.version(),
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "memory_gib": properties.total_memory / 2**30,
        "capability": f"{properties.major}.{properties.minor}",
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn_tf32": cudnn.allow_tf32,
    }


def _first_line(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), None)


def read_high_water_mark() -> int | None:
    """Return the highest memory use of this process (VmHWM) in bytes, None where the system does not tell.

    Unlike `ru_maxrss` it does not include the parent's before `exec`.
    """
    value = proc_value("/proc/self/status", "VmHWM")
    return int(value.split()[0]) * 1024 if value else None


def _cpu_mhz() -> float | None:
    value = proc_value("/proc/cpuinfo", "cpu MHz")
    return float(value) if value else None


def _ram_gib() -> float | None:
    value = proc_value("/proc/meminfo", "MemTotal")
    return int(value.split()[0]) / 2**20 if value else None
