"""The machine and the versions that figures depend on, and what other programs do meanwhile."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil
import torch

import elfatt_sd
from elfatt_sd.allocation import keeps_freed_memory
from elfatt_sd.devices import cpu_name, device_name

_PACKAGES = (
    "torch",
    "diffusers",
    "transformers",
    "accelerate",
    "tomesd",
    "DeepCache",
    "tgate",
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
_BUSY = ("user", "nice", "system", "irq", "softirq", "steal")  # the times of a processor, as psutil names them
_IDLE = ("idle", "iowait")


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return versions, processor, accelerator and attention backends as plain data."""
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


def read_clocks(device: torch.device) -> dict[str, Any]:
    """Return the present clocks in MHz, and temperature and power where they can be read."""
    if device.type != "cuda":
        return {"cpu_mhz": _cpu_mhz()}
    fields = ("clocks.sm", "clocks.mem", "clocks.max.sm", "temperature.gpu", "power.draw")
    card = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    by_number = f"--id=GPU-{card}"  # its index would ignore CUDA_VISIBLE_DEVICES
    asked = f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", by_number
    query = None if card is None or torch.version.hip else _first_line("nvidia-smi", *asked)
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


class Bystanders:
    """Measures what fraction of the machine's processor time went to other processes, from its making on."""

    def __init__(self) -> None:
        self._start = _processor_seconds()

    def share(self) -> float | None:
        now = _processor_seconds()
        if now is None or self._start is None:
            return None
        everything, busy, own = (after - before for after, before in zip(now, self._start, strict=True))
        return min(1.0, max(0.0, (busy - own) / everything)) if everything > 0 else None


def _processor_seconds() -> tuple[float, float, float] | None:
    try:
        times, own = psutil.cpu_times(), os.times()
    except OSError:
        return None
    busy, idle = (sum(getattr(times, name, 0.0) for name in names) for names in (_BUSY, _IDLE))
    return busy + idle, busy, own.user + own.system + own.children_user + own.children_system


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
        "runtime": torch.version.cuda or f"ROCm {torch.version.hip}",
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


def _cpu_mhz() -> float | None:
    try:
        found = psutil.cpu_freq()
    except (AttributeError, NotImplementedError, OSError, RuntimeError):  # what it raises where there is no such number
        return None
    return float(found.current) if found else None


def _ram_gib() -> float | None:
    try:
        return float(psutil.virtual_memory().total / 2**30)
    except OSError:
        return None
