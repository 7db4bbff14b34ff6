"""Schedulers: those that callers hold, and those in place of a model's own, tried before they are used."""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType
from typing import Any

import torch

from elfatt_sd.errors import ElfattError
from elfatt_sd.loaders import shortened

_PASSED_OVER = ("elfatt_sd", "torch")  # packages whose functions hold no scheduler of their own
_LOOKED_AT = 256  # entries of a container
_PLAIN = {int, float, str, bool, type(None), torch.Tensor, FunctionType, BuiltinFunctionType, MethodType, type}
_STEPS = 10  # of a trial; with fewer, some schedulers begin far below the highest timestep


def scheduler_like(own: Any, kind: Any, **settings: Any) -> Any:
    """Make a scheduler of another class with the settings of a model's own.

    Args:
        own: the model's scheduler.
        kind: the class.
        **settings: those that differ.

    Raises:
        ElfattError: it does not denoise what the model's own does; the message is the reason, a part of a sentence.
    """
    try:
        made = kind.from_config(own.config, **settings)
        begins, wanted = (_try(copy.deepcopy(each)) for each in (made, own))
    except (ArithmeticError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ElfattError(f"it fails with the model's settings ({shortened(error)})") from error
    if _predicted(made) != _predicted(own):
        raise ElfattError(f"it takes the model's {_predicted(own)} for {_predicted(made)}")
    if not wanted / 2 <= begins <= wanted * 2:
        raise ElfattError(f"its first timestep is {begins:g} where the model's is {wanted:g}")
    return made


def _try(scheduler: Any) -> float:
    """Do the first step of a run, and return its timestep; whatever fails is raised."""
    count = min(_STEPS, scheduler.config.get("num_train_timesteps") or _STEPS)
    scheduler.set_timesteps(count, **({"mu": 1.0} if scheduler.config.get("use_dynamic_shifting") else {}))
    first, sample = scheduler.timesteps[0], torch.zeros(1, 3, 8, 8, dtype=torch.float32, device="cpu")
    with torch.random.fork_rng(devices=[]):
        scheduler.step(sample, first, sample)
    return float(first)


def _predicted(scheduler: Any) -> str:
    """Name what a scheduler takes the network's output for."""
    declared = inspect.signature(type(scheduler).__init__).parameters  # other settings are kept without an effect
    settings = {name: value for name, value in scheduler.config.items() if name in declared}
    if hasattr(scheduler, "scale_noise") or settings.get("use_flow_sigmas"):
        return "flow_prediction"
    return str(settings.get("prediction_type", "something else"))


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
    """Return the values of a function's variables, and of those of its module that it names."""
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
    """Return what an object holds, without calling any code of its class."""
    if issubclass(kind, dict):
        return list(dict.values(value))[:_LOOKED_AT]
    if issubclass(kind, list | tuple):
        return list(itertools.islice(value, _LOOKED_AT))
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return ()
    return list(held.values())[:_LOOKED_AT] if type(held) is dict and not inspect.ismodule(value) else ()
