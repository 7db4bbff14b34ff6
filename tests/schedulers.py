"""Schedulers by name, and where a timestep is on their schedule."""

from __future__ import annotations

from typing import Any

import diffusers
import tiny_pipelines as tiny

from elfatt_sd.runtime.schedule import Position

KARRAS = {"use_karras_sigmas": True}


SCHEDULERS: list[tuple[str, dict[str, Any]]] = [
    ("DDIMScheduler", {}),
    ("DDPMScheduler", {}),
    ("PNDMScheduler", {"skip_prk_steps": True, "steps_offset": 1}),
    ("EulerDiscreteScheduler", {}),
    ("EulerDiscreteScheduler", KARRAS),
    ("EulerAncestralDiscreteScheduler", {}),
    ("HeunDiscreteScheduler", {}),
    ("HeunDiscreteScheduler", KARRAS),
    ("KDPM2DiscreteScheduler", {}),
    ("KDPM2DiscreteScheduler", KARRAS),
    ("DPMSolverMultistepScheduler", {}),
    ("DPMSolverMultistepScheduler", KARRAS),
    ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}),
    ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++", **KARRAS}),
    ("UniPCMultistepScheduler", {}),
    ("UniPCMultistepScheduler", KARRAS),
    ("LCMScheduler", {}),
]
IDS = [name + "".join(f"-{value}" for value in extra.values()) for name, extra in SCHEDULERS]


def scheduler(name: str, extra: dict[str, Any]) -> Any:
    return getattr(diffusers, name)(**tiny.SD15_SCHEDULE, **extra)


def place(value: float) -> Position:
    return Position(int(999 - value), 1000, False)
