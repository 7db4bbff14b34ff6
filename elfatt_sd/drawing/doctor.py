"""What this machine has and what is missing, and whether attention computes on its devices what it should.

What could be broken is imported by the section that looks at it.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from elfatt_sd.errors import PACKAGES, in_plain_words, install_line

TOLERANCE = 1e-5  # of attention in float32


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str  # what was looked at
    value: str  # what was found
    # `missing` is needed; what is `optional` is not there, and not needed
    status: Literal["ok", "missing", "optional", "info"] = "info"
    remedy: str = ""  # what to do about it


def examine() -> dict[str, list[Finding]]:
    """Look at everything; what raises in one section is a finding, so that the others are still shown."""
    sections: dict[str, list[Finding]] = {}
    for name, look in (
        ("machine", _machine),
        ("needed packages", _needed_packages),
        ("optional packages", _optional_packages),
        ("self-check", _self_check),
    ):
        found = sections[name] = []
        try:
            found.extend(look())
        except Exception as error:
            found.append(Finding(name, in_plain_words(error), "missing"))
    return sections


def healthy(sections: dict[str, list[Finding]]) -> bool:
    return all(finding.status != "missing" for findings in sections.values() for finding in findings)


def _machine() -> Iterator[Finding]:
    import torch

    from elfatt_sd.devices import accelerators, describe_machine, device_name

    here = describe_machine(torch.device("cpu"))
    yield Finding("system", here["platform"])
    yield Finding("Python", f"{here['python']} ({sys.executable})")
    yield Finding("CPU", f"{here['cpu']}, {here['cpu_cores']} cores, threads used: {here['cpu_threads']}")
    yield Finding("memory", f"{here['ram_gib']:.1f} GiB")
    for kind, number in accelerators().items():
        for device in (torch.device(kind, index) for index in range(number)):
            details = ""
            if kind == "cuda":
                cuda = describe_machine(device)["cuda"]
                details = f", {cuda['memory_gib']:.0f} GiB, compute capability {cuda['capability']}, driver "
                details += f"{cuda['driver']}, {'CUDA ' * (torch.version.hip is None)}{cuda['runtime']}"
            yield Finding(str(device), device_name(device) + details, "ok")
    if not accelerators():
        yield Finding("GPU", "none: everything runs on the CPU", "optional")


def _needed_packages() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    for requirement in map(Requirement, importlib.metadata.requires("elfatt-sd") or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            found = "not installed"
        if found != "not installed" and requirement.specifier.contains(found, prereleases=True):
            yield Finding(requirement.name, found, "ok")
        else:
            install = f"pip install '{requirement.name}{requirement.specifier}'"
            yield Finding(requirement.name, found, "missing", install)


def _optional_packages() -> Iterator[Finding]:
    for name, package in PACKAGES.items():
        if package.missing:
            yield Finding(name, f"for {package.purpose}", "optional", install_line(name))
        else:
            yield Finding(name, importlib.metadata.version(name), "ok")


def _self_check() -> Iterator[Finding]:
    import torch

    from elfatt_sd.attention import softmax
    from elfatt_sd.devices import accelerators

    options: Any = {"agents": 6, "block_size": 16, "backend": "native"}
    drawn = torch.randn(3, 2, 62, 4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
    expected = softmax.elfatt_attention(*drawn, **options)
    for device in ["cpu", *accelerators()]:
        found = softmax.elfatt_attention(*drawn.float().to(device), **options).cpu().double()
        error = float((found - expected).abs().max())
        value = f"ELFATT-SD attention is within {error:.1e} of its formula in float64 (accepted: {TOLERANCE:g})"
        if error <= TOLERANCE:
            yield Finding(device, value, "ok")
        else:
            yield Finding(device, value, "missing", "report this with the lines above")
