"""Schedulers in place of a model's own, tried before they are used."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch

from elfatt_sd.errors import ElfattError
from elfatt_sd.loaders import shortened

_STEPS = 10  # of a trial; with fewer, some schedulers begin far below the highest timestep


def scheduler_like(own: Any, kind: Any, **settings: Any) -> Any:
    """Make a scheduler of another class with the settings of a model's own."""
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
