"""Errors that a user can cause, simple checks of values, and what an optional package needs."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Collection
from dataclasses import dataclass


class ElfattError(ValueError):
    """An error that a user can cause; the message names the value and what is accepted."""


class ElfattFailure(ElfattError):
    """What was asked for is right, but it could not be done: the hub, a disk or the memory is at fault."""


def choice(name: str, value: object, accepted: Collection[str]) -> None:
    if value not in accepted:
        raise ElfattError(f"{name}={value!r} is not known; accepted: {', '.join(accepted)}.")


def whole(name: str, value: object, low: int, high: int | None = None) -> None:
    span = f"of at least {low}" if high is None else f"from {low} to {high}"
    if type(value) is not int or value < low or (high is not None and value > high):
        raise ElfattError(f"{name}={value!r} is not accepted; give a whole number {span}.")


def real(name: str, value: object, low: float, high: float, *, open_high: bool = False) -> None:
    """Check that a value is a number in a range, `high` included or not."""
    span = f"from {low:g} to less than {high:g}" if open_high else f"from {low:g} to {high:g}"
    valid = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not valid or not low <= value <= high or (open_high and value == high):  # type: ignore[operator]
        raise ElfattError(f"{name}={value!r} is not accepted; give a number {span}.")


def flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ElfattError(f"{name}={value!r} is not accepted; give True or False.")


@dataclass(frozen=True)
class OptionalPackage:
    """A package that the core does without."""

    module: str  # is there where the package is installed
    purpose: str  # what it is for
    extra: str = ""  # of elfatt-sd that installs it; empty for a package that is installed by itself

    @property
    def missing(self) -> bool:
        return importlib.util.find_spec(self.module) is None


PACKAGES = {
    "torchmetrics": OptionalPackage("torchmetrics", "scores of evaluations", "eval"),
    "matplotlib": OptionalPackage("matplotlib", "plots of evaluations and benchmarks", "eval"),
    "jinja2": OptionalPackage("jinja2", "reports of evaluations", "eval"),
    "markupsafe": OptionalPackage("markupsafe", "reports of evaluations", "eval"),
    "tomesd": OptionalPackage("tomesd", "its rows in evaluations and benchmarks", "eval"),
    "DeepCache": OptionalPackage("DeepCache", "its rows in evaluations and benchmarks", "peers"),
    "tgate": OptionalPackage("tgate", "its rows in evaluations and benchmarks", "peers"),
    "torch-fidelity": OptionalPackage("torch_fidelity", "FID with Inception", "inception"),
    "torchvision": OptionalPackage("torchvision", "LPIPS, DISTS, and FID with Inception", "inception"),
    "pyarrow": OptionalPackage("pyarrow", "a reference set in parquet files", "parquet"),
    "peft": OptionalPackage("peft", "LoRA in diffusers"),
    "gradio": OptionalPackage("gradio", "the page of elfatt-sd demo", "ui"),
    "nbconvert": OptionalPackage("nbconvert", "executing the notebooks", "notebooks"),
}
REPORT = ("matplotlib", "jinja2", "markupsafe")


def install_line(*names: str) -> str:
    extras = dict.fromkeys(PACKAGES[name].extra for name in names if PACKAGES[name].extra)
    own = [f"'elfatt-sd[{','.join(extras)}]'"] if extras else []
    return " ".join(["pip install", *own, *(name for name in names if not PACKAGES[name].extra)])


def need(what: str, *names: str) -> None:
    """Check that packages are there, before the work that needs them begins."""
    missing = [name for name in names if PACKAGES[name].missing]
    if missing:
        raise ElfattError(f"{what} needs {', '.join(missing)} (not installed): {install_line(*missing)}")


_NO_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "status_alloc_failed",  # cuBLAS, and cuDNN before 9
    "device_allocation_failed",  # cuDNN
    "host_allocation_failed",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether memory ran out; of PyTorch's errors by their words, so that nothing needs to import it."""
    said = isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _NO_MEMORY)
    return said or isinstance(error, MemoryError)


def in_plain_words(error: Exception) -> str:
    """Say what failed: a file by its path, memory by how much was asked for, anything else by its class and message."""
    if isinstance(error, ElfattError):
        return str(error)
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    if is_out_of_memory(error):
        amount = ""
        if asked := re.search(r"ried to allocate ([\d.]+) (\w+)", str(error)):
            size = f"{int(asked[1]) / 2**30:.1f} GiB" if asked[2] == "bytes" else f"{float(asked[1]):g} {asked[2]}"
            amount = f": {size} more were asked for"
        return f"out of memory{amount}; give a smaller height and width, or close what else uses the memory"
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
