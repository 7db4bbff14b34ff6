"""Errors that a user can cause, simple checks of values, and what an optional package needs."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import re
import textwrap
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints


class ElfattError(ValueError):
    """An error that a user can cause; the message names the value and what is accepted."""


class ElfattFailure(ElfattError):
    """What was asked for is right, but it could not be done: the hub, a disk or the memory is at fault."""


def choice(name: str, value: object, accepted: Collection[object]) -> None:
    if value not in accepted:
        raise ElfattError(f"{name}={value!r} is not known; accepted: {', '.join(map(str, accepted))}.")


def whole(name: str, value: object, low: int, high: int | None = None) -> None:
    span = f"of at least {low}" if high is None else f"from {low} to {high}"
    if type(value) is not int or value < low or (high is not None and value > high):
        raise ElfattError(f"{name}={value!r} is not accepted; give a whole number {span}.")


def real(name: str, value: object, low: float, high: float, *, open_high: bool = False) -> None:
    """Check that a value is a number in a range, `high` included or not."""
    span = "" if high == math.inf else f" from {low:g} to {'less than ' * open_high}{high:g}"
    valid = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not valid or not low <= value <= high or (open_high and value == high):  # type: ignore[operator]
        raise ElfattError(f"{name}={value!r} is not accepted; give a number{span}.")


def flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ElfattError(f"{name}={value!r} is not accepted; give True or False.")


_RULES: dict[Any, Callable[..., None]] = {  # by the type of a field, whose metadata has other limits
    int: functools.partial(whole, low=1),
    bool: flag,
    float: functools.partial(real, low=0.0, high=1.0),
}


@functools.cache
def _rules(kind: type[Any]) -> dict[str, Callable[[str, Any], None]]:
    """Return what checks fields of a class of this package, or of the nearest one that a user's comes from."""
    own = next(each for each in kind.__mro__ if each.__module__.partition(".")[0] == __package__)
    hints, rules = get_type_hints(own), dict[str, Callable[[str, Any], None]]()
    for each in dataclasses.fields(own):
        choices = get_args(hints[each.name])
        hint = choices[0] if type(None) in choices else hints[each.name]
        rule = _RULES.get(hint)
        if get_origin(hint) is Literal:
            rule = functools.partial(choice, accepted=get_args(hint))
        if rule is not None:
            rules[each.name] = functools.partial(rule, **each.metadata)
    return rules


def fields(value: Any) -> None:
    """Check the numbers, flags and choices of a dataclass by their types; None is fine where it is the default."""
    kind: Any = type(value)
    rules = _rules(kind)
    for field in dataclasses.fields(value):
        own = getattr(value, field.name)
        if field.name in rules and (own is not None or field.default is not None):
            rules[field.name](field.name, own)


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
    own = [f"'.[{','.join(extras)}]'"] if extras else []  # in a checkout, as README has it
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


_NOT_REACHED = {"ConnectionError", "TransportError", "Timeout", "TimeoutError", "gaierror", "OfflineModeIsEnabled"}
_REACHED = {"RepositoryNotFoundError", "RevisionNotFoundError", "GatedRepoError", "RemoteEntryNotFoundError"}


def is_unreachable(error: BaseException) -> bool:
    """Tell whether it is the hub's fault, or the network's, that something could not be loaded; by names of classes."""
    chain = list(causes(error))
    names = {kind.__name__ for each in chain for kind in type(each).__mro__}
    statuses = [getattr(getattr(each, "response", None), "status_code", 0) for each in chain]
    return bool((names & _NOT_REACHED or max(statuses) >= 500) and not names & _REACHED)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def shortened(error: BaseException) -> str:
    return textwrap.shorten(str(error), 240, placeholder=" ...") or type(error).__name__
