"""The image of a patched pipeline, and which layers have our processor."""

from __future__ import annotations

from typing import Any

import torch

from elfatt_sd.config import METHODS
from elfatt_sd.runtime.processor import ElfattProcessor

ACTIVE = [method for method in METHODS if method != "sd"]


def picture(pipe: Any, steps: int = 3, **options: Any) -> torch.Tensor:
    given = {"prompt": "a b", "guidance_scale": 3.0, "generator": torch.Generator().manual_seed(5), **options}
    return pipe(num_inference_steps=steps, output_type="pt", **given).images


def elfatt_processors(net: torch.nn.Module) -> list[str]:
    """Names of the layers that have our processor."""
    modules = net.named_modules()
    return [name for name, module in modules if isinstance(getattr(module, "processor", None), ElfattProcessor)]
