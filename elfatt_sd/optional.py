"""Packages that only some commands need: what each is for, and how to install it."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from elfatt_sd.config import ElfattError


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
        absent = f"{', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed"
        raise ElfattError(f"{what} needs {absent}: {install_line(*missing)}")


def remedy(error: ImportError) -> str:
    module = (error.name or "").partition(".")[0]
    return next((install_line(name) for name, package in PACKAGES.items() if package.module == module), "")
