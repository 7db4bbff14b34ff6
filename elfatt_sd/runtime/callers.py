"""Whose schedule a call is on: the schedulers that the functions on the way to it hold."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType
from typing import Any

import torch

_PASSED_OVER = ("elfatt_sd", "torch")  # packages whose functions hold no scheduler of their own
_LOOKED_AT = 256  # entries of a container
_PLAIN = {int, float, str, bool, type(None), torch.Tensor, FunctionType, BuiltinFunctionType, MethodType, type}


def schedulers_of_callers() -> Iterator[list[Any]]:
    """Yield the schedulers that each function on the way to this call holds, from the innermost outwards.

    They are what its variables are, or what these hold, as pipelines, lists and other objects do.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _PASSED_OVER:
            held = {id(found): found for value in _variables(frame) for found in _schedulers_in(value)}
            if held:
                yield list(held.values())
        frame = frame.f_back


def _variables(frame: FrameType) -> list[Any]:
    names, code = frame.f_locals, frame.f_code
    values = list(names.values())
    if not code.co_flags & inspect.CO_OPTIMIZED:  # a module
        return values
    if isinstance(names, dict) and sys.getrefcount(names) <= 3:  # up to Python 3.12, a copy that the frame keeps
        names.clear()
    return values + [frame.f_globals[name] for name in code.co_names if name in frame.f_globals]


def _schedulers_in(value: Any, depth: int = 2) -> Iterator[Any]:
    kind = type(value)
    if kind in _PLAIN:
        return
    if hasattr(kind, "set_timesteps"):
        yield value
    elif depth:
        for each in _parts(value, kind):
            yield from _schedulers_in(each, depth - 1)


def _parts(value: Any, kind: type) -> Iterable[Any]:
    if issubclass(kind, dict):
        return list(dict.values(value))[:_LOOKED_AT]
    if issubclass(kind, list | tuple):
        return list(itertools.islice(value, _LOOKED_AT))
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return ()
    return list(held.values())[:_LOOKED_AT] if type(held) is dict and not inspect.ismodule(value) else ()
