"""What a method costs the host: device operations of a call, and time before the denoiser's first operation.

    python benchmarks/host.py --model sd15 --size 512

Tensors are on the meta device, where nothing is computed: every operation that a GPU would be given is counted, and
what takes time is Python's. The time is the median over the steps of a run, from the call to the denoiser's own first
module, per patched layer; `first` is that of the run's first step, in which what later steps need is drawn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import elfatt_sd
from elfatt_sd.families import find_layers
from elfatt_sd.presets import METHODS
from elfatt_sd.processor import PatchedLayer
from elfatt_sd.shapes import call_arguments, empty_unet
from elfatt_sd.sizes import UNET_NAMES, SHAPES
from elfatt_sd.tiling import Grid

VIEWS = ("view", "_unsafe_view", "t", "transpose", "permute", "slice", "split", "split_with_sizes", "select", "expand")
VIEWS += ("unsqueeze", "squeeze", "detach", "alias", "as_strided", "unbind", "_reshape_alias", "lift_fresh")


class Operations(TorchDispatchMode):
    """Counts operations on the device that are more than a view."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple | list) and out else out
        on_device = isinstance(first, torch.Tensor) and first.is_meta
        self.count += on_device and func.__name__.split(".")[0] not in VIEWS
        return out


def main() -> None:
    """Print a row for each preset."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=UNET_NAMES, default="sd15")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    unet: Any = empty_unet(SHAPES[options.model]).eval()
    side = options.size // 8
    given = call_arguments(unet, Grid.image(side, side), 2, lambda *shape: torch.empty(shape, device="meta"))
    timesteps = torch.arange(981, 0, -981 // options.steps)[: options.steps]
    untouched = operations(unet, given, timesteps[0])
    print(f"{options.model}, {options.size} pixels: {untouched} operations untouched")
    print("| method | phase | layers | more operations a layer | host time a layer, us | first |\n|---|---|---|---|---|---|")
    for method in METHODS:
        elfatt_sd.apply_patch(unet, method)
        layers = [state for layer in find_layers(unet) if (state := getattr(layer.attention, "elfatt_state", None))]
        if not layers:
            continue
        seen: dict[Any, list[float]] = {}
        for timestep in timesteps:
            seconds = until_first(unet, given, timestep)
            seen.setdefault(phase_of(layers[0]), []).append(1e6 * seconds / len(layers))
        for phase, times in seen.items():
            if phase.exact:
                continue
            step = next(t for t in timesteps if until_first(unet, given, t) and phase_of(layers[0]) is phase)
            more = (operations(unet, given, step) - untouched) / len(layers)
            row = [method, phase.attention.name, len(layers), f"{more:.0f}", f"{statistics.median(times):.1f}", f"{times[0]:.0f}"]
            print(f"| {' | '.join(map(str, row))} |")
        elfatt_sd.remove_patch(unet)


def phase_of(layer: PatchedLayer) -> Any:
    """Return the phase of a layer's latest call."""
    assert layer.latest is not None
    return layer.latest.phase


def operations(unet: Any, given: dict[str, Any], timestep: Any) -> int:
    """Return the operations of a call."""
    with torch.no_grad(), Operations() as mode:
        unet(**{**given, "timestep": timestep})
    return mode.count


class _Stop(Exception):
    """Ends a call at its first operation."""


def until_first(unet: Any, given: dict[str, Any], timestep: Any) -> float:
    """Return the seconds from a call to the denoiser's first own module."""

    def stop(*_: Any) -> None:
        raise _Stop

    handle = unet.time_proj.register_forward_pre_hook(stop, prepend=True)
    start = time.perf_counter()
    try:
        with torch.no_grad():
            unet(**{**given, "timestep": timestep})
    except _Stop:
        return time.perf_counter() - start
    finally:
        handle.remove()
    raise RuntimeError("the denoiser has no time_proj")


if __name__ == "__main__":
    main()
