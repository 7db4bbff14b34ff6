"""The machine and the versions: what a figure depends on beside the protocol; and when the machine is too small."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import elfatt_sd

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
    "xformers",
)
_IMAGE_PACKAGES = ("torch", "diffusers", "transformers")  # those whose version can change an image


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Return versions, processor, accelerator, clocks and attention backends as plain data.

    Args:
        device: the device that the pipeline runs on.
    """
    return {
        "elfatt_sd": elfatt_sd.__version__,
        "commit": _first_line("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "device": device_name(device),
        "cpu": _cpu_name(),
        "cpu_cores": os.cpu_count(),
        "cpu_threads": torch.get_num_threads(),
        "ram_gib": _ram_gib(),
        "cuda": _cuda(device) if device.type == "cuda" else None,
        "attention_backends": attention_backends(device),
    }


def same_images(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """List what differs between two environments so that images could differ too."""
    old, new = _decisive(before), _decisive(now)
    return [f"{key}: {old[key]} there, {new[key]} here" for key in new if old[key] != new[key]]


def _decisive(environment: dict[str, Any]) -> dict[str, Any]:
    packages = environment.get("packages", {})
    own = {key: environment.get(key) for key in ("elfatt_sd", "device", "model_sha256", "prompts_sha256")}
    return own | {name: packages.get(name) for name in _IMAGE_PACKAGES}


def device_name(device: torch.device) -> str:
    """Return the name of the processor that a device stands for."""
    if device.type == "cpu":
        return f"{os.cpu_count()} cores of {_cpu_name()}"
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} of {platform.machine()}"


def read_clocks(device: torch.device) -> dict[str, Any]:
    """Return the present clocks in MHz, and temperature and power where they can be read."""
    if device.type != "cuda":
        return {"cpu_mhz": _cpu_mhz()}
    fields = ("clocks.sm", "clocks.mem", "clocks.max.sm", "temperature.gpu", "power.draw")
    query = _first_line(
        "nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", f"--id={device.index or 0}"
    )
    return dict(zip(fields, (value.strip() for value in query.split(",")), strict=False)) if query else {}


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an exception says that memory ran out, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        sign in text for sign in ("can't allocate memory", "not enough memory", "out of memory")
    )


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
    }


def _first_line(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), None)


def _proc_value(file: str, key: str) -> str | None:
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key), None)


def _cpu_name() -> str:
    return _proc_value("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def _cpu_mhz() -> float | None:
    value = _proc_value("/proc/cpuinfo", "cpu MHz")
    return float(value) if value else None


def _ram_gib() -> float | None:
    value = _proc_value("/proc/meminfo", "MemTotal")
    return int(value.split()[0]) / 2**20 if value else None
