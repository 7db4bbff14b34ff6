"""UNets of known shapes without weights, the arguments that a denoiser's call takes, and what a call costs."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from elfatt_sd.families import family_of, unwrap
from elfatt_sd.families.base import Fill
from elfatt_sd.families.unet import SCALE
from elfatt_sd.sizes import SHAPES


@dataclass(frozen=True)
class Sketch:
    """What a plan needs of a pipeline: a UNet without weights, and pixels of the image to one of the latent."""

    unet: nn.Module
    vae_scale_factor: int = SCALE


def sketch(name: str) -> Sketch:
    """Return a shape of `SHAPES` without weights: nothing is allocated."""
    return Sketch(empty_unet(SHAPES[name]))


def empty_unet(shape: Mapping[str, Any]) -> nn.Module:
    """Build a UNet on the meta device."""
    import diffusers

    make: Any = diffusers.UNet2DConditionModel
    with torch.device("meta"):
        unet: nn.Module = make(**shape)
    return unet


def call_arguments(denoiser: nn.Module, height: int, width: int, batch: int, fill: Fill) -> dict[str, Any]:
    """Return keyword arguments that a denoiser can be called with; see `families.base.Family.arguments`."""
    module = unwrap(denoiser)
    return family_of(module).arguments(module, height, width, batch, fill)


@dataclass(frozen=True)
class Blueprint:
    """A denoiser's class and configuration: as much of it as its call's multiply-adds depend on, without weights."""

    kind: type
    config: str

    @classmethod
    def of(cls, denoiser: nn.Module) -> Blueprint:
        """Take down a denoiser; adapters such as LoRA are left out."""
        module: Any = unwrap(denoiser)
        return cls(type(module), json.dumps(dict(getattr(module, "config", {})), default=list, sort_keys=True))

    @functools.cache  # noqa: B019 - a blueprint is small, and there are few
    def multiply_adds(self, height: int, width: int) -> int | None:
        """Return the multiply-adds of an untouched call for one image; None where it cannot be run without weights.

        Args:
            height: of the latent.
            width: of the latent.
        """
        try:
            with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
                module: Any = self.kind.from_config(json.loads(self.config)).eval()  # type: ignore[attr-defined]
                module(**call_arguments(module, height, width, 1, torch.empty))
        except Exception:  # of a class that takes other arguments, or reads values: whatever its authors raise
            return None
        return int(counter.get_total_flops()) // 2 or None
