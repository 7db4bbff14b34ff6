"""What this machine has and what is missing, and whether attention computes on its devices what it should."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["ok", "missing", "optional", "info"]

TOLERANCE = 1e-5  # of attention in float32


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str  # what was looked at
    value: str  # what was found
    status: Status = "info"  # `ok`, `missing` (needed), `optional` (not there, and not needed), or `info`
    remedy: str = ""  # what to do about it

    def to_dict(self) -> dict[str, str]:
        return dataclasses.asdict(self)


def examine() -> dict[str, list[Finding]]:
    """Look at everything; nothing raises, and nothing is left behind."""
    sections: dict[str, Callable[[], Iterator[Finding]]] = {
        "machine": _machine,
        "needed packages": _needed_packages,
        "optional packages": _optional_packages,
        "attention backends": _backends,
        "self-check": _self_check,
    }
    return {name: list(_guarded(name, look)) for name, look in sections.items()}


def healthy(sections: dict[str, list[Finding]]) -> bool:
    return all(finding.status != "missing" for findings in sections.values() for finding in findings)


def _guarded(name: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Turn an error of one section into a finding, so that the others are still shown."""
    try:
        yield from look()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        yield Finding(name, f"{type(error).__name__}: {lines[0]}", "missing")


def _machine() -> Iterator[Finding]:
    import torch

    from elfatt_sd.devices import accelerators, describe_machine, device_name

    here = describe_machine(torch.device("cpu"))
    yield Finding("system", here["platform"])
    yield Finding("Python", f"{here['python']} ({sys.executable})")
    yield Finding("CPU", f"{here['cpu']}, {here['cpu_cores']} cores, threads used: {here['cpu_threads']}")
    yield Finding("memory", f"{here['ram_gib']:.1f} GiB" if here["ram_gib"] else "not known")
    for index in range(accelerators().get("cuda", 0)):
        device = torch.device("cuda", index)
        cuda = describe_machine(device)["cuda"]
        runtime = f"{'CUDA ' * (torch.version.hip is None)}{cuda['runtime']}"
        details = f"{cuda['memory_gib']:.0f} GiB, compute capability {cuda['capability']}, driver {cuda['driver']}"
        yield Finding(str(device), f"{device_name(device)}, {details}, {runtime}", "ok")
    for kind in accelerators().keys() - {"cuda"}:
        yield Finding(kind, device_name(torch.device(kind)), "ok")
    if not accelerators():
        yield Finding("GPU", "none: everything runs on the CPU", "optional")


def _needed_packages() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    for requirement in map(Requirement, _requirements()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        install = f"pip install '{requirement.name}{requirement.specifier}'"
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(requirement.name, "not installed", "missing", install)
            continue
        fits = requirement.specifier.contains(found, prereleases=True)
        yield Finding(requirement.name, found, "ok" if fits else "missing", "" if fits else install)


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires("elfatt-sd") or []
    except importlib.metadata.PackageNotFoundError:
        return ["torch", "diffusers", "transformers", "accelerate", "safetensors", "numpy", "pillow"]


def _optional_packages() -> Iterator[Finding]:
    from elfatt_sd.errors import PACKAGES, install_line

    for name, package in PACKAGES.items():
        if package.missing:
            yield Finding(name, f"for {package.purpose}", "optional", install_line(name))
        else:
            yield Finding(name, importlib.metadata.version(name), "ok")


def _backends() -> Iterator[Finding]:
    from elfatt_sd.attention.softmax import PACKAGES

    yield Finding("native", "PyTorch's scaled_dot_product_attention", "ok")
    if importlib.util.find_spec("diffusers.models.attention_dispatch") is None:
        yield Finding("others", "this diffusers has no attention dispatcher", "optional", "pip install -U diffusers")
        return
    for name, (module, install) in PACKAGES.items():
        if importlib.util.find_spec(module) is None:
            yield Finding(name, f"needs {module}", "optional", install)
        else:
            yield Finding(name, f"{module} is installed", "ok")


def _self_check() -> Iterator[Finding]:
    from elfatt_sd.devices import accelerators

    for device in ["cpu", *accelerators()]:
        error = attention_error(device)
        good = error <= TOLERANCE
        value = f"ELFATT-SD attention is within {error:.1e} of its formula in float64 (accepted: {TOLERANCE:g})"
        yield Finding(device, value, "ok" if good else "missing", "" if good else "report this with the lines above")


def attention_error(device: str) -> float:
    """Return the largest difference between ELFATT-SD attention in float32 on a device and in float64 on the CPU."""
    import torch

    from elfatt_sd.attention.softmax import elfatt_attention

    options: Any = {"agents": 6, "block_size": 16, "backend": "native"}
    drawn = torch.randn(3, 2, 62, 4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
    there = elfatt_attention(*drawn.float().to(device), **options).cpu().double()
    return float((there - elfatt_attention(*drawn, **options)).abs().max())
