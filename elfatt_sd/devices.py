"""Kinds of devices: what they can do, memory, tracing."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import elfatt_sd
from elfatt_sd.errors import ElfattError

_DEVICE_ERROR = re.compile(r"(CUDA|HIP|XPU) error: ")
_PACKAGES = (
    *("torch", "diffusers", "transformers", "accelerate", "tomesd", "DeepCache", "tgate"),
    *("torchmetrics", "torch-fidelity", "torchvision", "numpy", "pillow"),
    *("flash-attn", "flash-attn-3", "kernels", "sageattention", "xformers"),
)


def device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{os.cpu_count()} cores of {cpu_name()}"
    named = getattr(_of(device), "get_device_name", None)
    return str(named(device)) if named is not None else f"{device.type} of {platform.machine()}"


def _of(device: torch.device) -> Any:
    return getattr(torch, device.type, None)


@functools.cache
def cpu_name() -> str:
    return proc_value("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def proc_value(file: str, key: str) -> str | None:
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key), None)


def accelerators() -> dict[str, int]:
    """Return the kinds of devices that are there besides the CPU, the one to take first, and the number of each."""
    found = {}
    for kind in ("cuda", "xpu", "mps"):
        module: Any = getattr(torch, kind, None)
        backend = getattr(torch.backends, kind, None)  # that of MPS tells it
        if getattr(module, "is_available", getattr(backend, "is_available", bool))():
            found[kind] = int(module.device_count())
    return found


def interprets_triton() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what it was given; the CPU always has."""
    if device.type == "mps":
        torch.mps.synchronize()  # there is only one
    elif device.type != "cpu" and (wait := getattr(_of(device), "synchronize", None)):
        wait(device)


def empty_caches() -> None:
    for kind in accelerators():
        getattr(torch, kind).empty_cache()


def standard_normal(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Draw in float32 on the CPU, whatever PyTorch's default dtype and device are."""
    return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")


@contextlib.contextmanager
def plain_defaults() -> Iterator[None]:
    """Make modules in float32 on the CPU, whatever PyTorch's default dtype and device are."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


def memory_counters(device: torch.device) -> Any:
    module = _of(device)
    return module if device.type != "cpu" and hasattr(module, "max_memory_allocated") else None


def written(tensor: torch.Tensor) -> object:
    """Return what differs once a tensor has been written or moved, without waiting for its device.

    Inference tensors do not count how often they are written: theirs differs every time.
    """
    if tensor.is_inference():
        return object()
    memory = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    return memory, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor._version


def is_device_error(error: BaseException) -> bool:
    kind = getattr(torch, "AcceleratorError", ())  # since PyTorch 2.8
    return isinstance(error, kind) or (isinstance(error, RuntimeError) and bool(_DEVICE_ERROR.match(str(error))))


_TRACED = (
    "a trace or an export of a patched model would hold one step's phase and random draws in every step; call "
    "elfatt_sd.remove_patch(pipe) first, or use torch.compile."
)


def is_exporting() -> bool:
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))  # since PyTorch 2.8


@torch.compiler.disable(reason=_TRACED)  # type: ignore[untyped-decorator, no-untyped-call]
def refuse_tracing(device: torch.device) -> None:
    """Refuse what would make a program of one call, of a patched model or of a part of it."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ElfattError(
            "a CUDA graph of a patched model would replay one step's phase and random draws in every step; use "
            "torch.compile(mode='reduce-overhead'), or call elfatt_sd.remove_patch(pipe) first."
        )
    proxies = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)  # of make_fx
    if torch._C._is_tracing() or is_exporting() or proxies is not None:
        raise ElfattError(_TRACED)


def memory_of(device: torch.device) -> tuple[float, float]:
    """Return the bytes that this process could have on a device, and those that are free now."""
    kind = _of(device)
    if hasattr(kind, "mem_get_info") and device.type != "cpu":  # CUDA, ROCm, XPU
        free, whole = kind.mem_get_info(device)
        cached = kind.memory_reserved(device) - kind.memory_allocated(device)
        return float(whole - kind.memory_allocated(device)), float(free + cached)
    if hasattr(kind, "recommended_max_memory"):  # MPS, which shares the memory of the CPU
        whole = float(kind.recommended_max_memory())
        return whole, max(0.0, whole - kind.driver_allocated_memory())
    memory, own = psutil.virtual_memory(), psutil.Process().memory_info().rss
    try:  # what a container may have, where there is a limit
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):  # no such file, or "max"
        limit = memory.total
    available = float(min(memory.total, limit) - own)
    return available, min(available, float(memory.available))


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h
_NEVER = 2**31 - 1
_kept = False


def keep_freed_memory() -> bool:
    """Let this process keep the memory that tensors on the CPU free, for the next ones.

    glibc gives large blocks back to the system at once, which clears them page by page before the next tensor may use
    them; for every layer of a UNet again. On CUDA PyTorch keeps freed memory too. The elfatt-sd command does so from
    the start; `docs/performance.md` says what it gains. It holds for the whole process and cannot be taken back. The
    memory that the process holds at most may grow.

    Returns:
        Whether memory is kept now; False where the C library is not glibc.
    """
    global _kept
    if sys.platform == "linux" and not _kept:
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        _kept = mallopt is not None and all(mallopt(limit, _NEVER) == 1 for limit in (_TRIM_THRESHOLD, _MMAP_THRESHOLD))
    return _kept


def describe_machine(device: torch.device) -> dict[str, Any]:
    packages: dict[str, str] = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    cuda, kernels = None, ["flash (CPU)", "math"]  # that torch's fused attention may choose from
    if device.type == "cuda":
        properties, cudnn = torch.cuda.get_device_properties(device), cast(Any, torch.backends.cudnn)
        cuda = {
            "runtime": torch.version.cuda or f"ROCm {torch.version.hip}",
            "cudnn": cudnn.version(),
            "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "memory_gib": properties.total_memory / 2**30,
            "capability": f"{properties.major}.{properties.minor}",
            "tf32": torch.backends.cuda.matmul.allow_tf32,
            "cudnn_tf32": cudnn.allow_tf32,
        }
        names = {"flash": "flash", "efficient": "mem_efficient", "cudnn": "cudnn", "math": "math"}
        kernels = [name for name, own in names.items() if getattr(torch.backends.cuda, f"{own}_sdp_enabled")()]
    return {
        "elfatt_sd": elfatt_sd.__version__,
        "commit": commit_of(Path(elfatt_sd.__file__).parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "device": device_name(device),
        "cpu": cpu_name(),
        "cpu_cores": os.cpu_count(),
        "cpu_threads": torch.get_num_threads(),
        "keeps_freed_memory": _kept,
        "ram_gib": float(psutil.virtual_memory().total / 2**30),
        "cuda": cuda,
        "attention_backends": {"scaled_dot_product_attention": kernels},
    }


def _first_line(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), None)


class Bystanders:
    """Measures what fraction of the machine's processor time went to other processes, from its making on."""

    def __init__(self) -> None:
        self._own = psutil.Process()
        self.share()

    def share(self) -> float | None:
        """None where the system does not tell, as in some sandboxes, where /proc is closed."""
        try:
            busy, own = psutil.cpu_percent(), self._own.cpu_percent()  # since the last time; of all, and of one
        except OSError:
            return None
        share: float = max(0.0, busy - own / (psutil.cpu_count() or 1)) / 100
        return share


def commit_of(folder: Path) -> str | None:
    """Return the commit that the files in a folder are of, with `+changes` where they are not as it has them.

    None where no repository tracks them: one that merely lies around an environment's packages says nothing of them.
    """
    git = ("git", "--no-optional-locks", "-C", str(folder))
    if _first_line(*git, "ls-files") is None:
        return None
    commit = _first_line(*git, "rev-parse", "HEAD")
    return f"{commit}+changes" if commit and _first_line(*git, "status", "--porcelain", "--", ".") else commit
