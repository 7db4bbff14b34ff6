"""What this machine has and what is missing.

What could be broken is imported by the section that looks at it.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from elfatt_sd.errors import PACKAGES, in_plain_words, install_line


@dataclass(frozen=True)
class Finding:
    name: str  # what was looked at
    value: str  # what was found
    # `missing` is needed; what is `optional` is not there, and not needed
    status: Literal["ok", "missing", "optional", "info"] = "info"
    remedy: str = ""  # what to do about it


def examine() -> tuple[dict[str, list[Finding]], bool]:
    """Look at everything, and tell whether nothing is missing.

    What raises in one section is a finding, so that the others are still shown.
    """
    sections: dict[str, list[Finding]] = {}
    looks = {"machine": _machine, "needed packages": _needed_packages, "optional packages": _optional_packages}
    for name, look in looks.items():
        found = sections[name] = []
        try:
            found.extend(look())
        except Exception as error:
            found.append(Finding(name, in_plain_words(error), "missing"))
    return sections, all(each.status != "missing" for found in sections.values() for each in found)


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
        install = f"pip install '{requirement.name}{requirement.specifier}'"
        try:
            found = importlib.metadata.version(requirement.name)
            fits = requirement.specifier.contains(found, prereleases=True)
        except importlib.metadata.PackageNotFoundError:
            found, fits = "not installed", False
        yield Finding(requirement.name, found, "ok") if fits else Finding(requirement.name, found, "missing", install)


def _optional_packages() -> Iterator[Finding]:
    for name, package in PACKAGES.items():
        if package.missing:
            yield Finding(name, f"for {package.purpose}", "optional", install_line(name))
        else:
            yield Finding(name, importlib.metadata.version(name), "ok")
