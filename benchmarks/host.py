"""What a method costs the host: operations that the device is given, and time before the denoiser's first one.

Tensors are on the meta device, where nothing is computed: every operation that a GPU would be given is counted, and
what takes time is Python's.

    python -m benchmarks.host --size 512 --size 1024 --out benchmarks/results
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import common
from elfatt_sd import benchmarking
from elfatt_sd.attention.ordering import Grid
from elfatt_sd.benchmarking.report import Results, Session
from elfatt_sd.benchmarking.variants import (
    PEER,
    Size,
    Variant,
    height_and_width,
    is_peer,
    line_up,
    read_size,
    resolve_methods,
)
from elfatt_sd.config import METHODS, PatchConfig
from elfatt_sd.families import family_of, find_layers, levels_of, main_denoiser, select_layers
from elfatt_sd.families.shapes import UNET_NAMES, empty_model
from elfatt_sd.families.unet import SCALE
from elfatt_sd.patch import apply_patch
from elfatt_sd.phases import EXACT, Phase
from elfatt_sd.plans import describe
from elfatt_sd.runtime.layer import fitted

COUNTED = 4  # steps of a phase whose operations are counted: as many as share a difference by default
_VIEWS = {
    "_reshape_alias",
    "_unsafe_view",
    "alias",
    "as_strided",
    "detach",
    "expand",
    "lift_fresh",
    "permute",
    "select",
}
_VIEWS |= {"slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view"}


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations on the device that are more than a view."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operation and do it."""
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple | list) and out else out
        if isinstance(first, Tensor) and first.is_meta and func.__name__.split(".")[0] not in _VIEWS:
            self.count += 1
        return out


class Calls:
    """Calls of a UNet on the meta device.

    Args:
        model: name of its shape.
        size: of the image, as for `unet`.
        batch: rows.
        steps: of a run.
    """

    def __init__(self, model: str, size: Size, batch: int, steps: int) -> None:
        self.unet: Any = empty_model(benchmarking.SHAPES[model]).eval()
        grid = Grid.image(*(side // SCALE for side in height_and_width(size)))
        empty = functools.partial(torch.empty, dtype=torch.float32, device="meta")
        self._given = family_of(self.unet).arguments(self.unet, grid, batch, empty)
        self._timesteps = torch.arange(999, -1, -(1000 // steps), device="cpu")[:steps]

    def call(self, step: int) -> None:
        """Call it in a step; its sample by position, as tomesd wants it."""
        (_, sample), *others = {**self._given, "timestep": self._timesteps[step]}.items()
        with torch.no_grad():
            self.unet(sample, **dict(others))

    def operations(self, step: int) -> int:
        """Return the operations of a call."""
        counted = Operations()  # type: ignore[no-untyped-call]
        with counted:
            self.call(step)
        return counted.count

    def seconds(self, steps: Iterable[int]) -> list[float]:
        """Return the time from each call to the UNet's own first module."""
        return [self._until_first(step) for step in steps]

    def _until_first(self, step: int) -> float:
        def stop(*_: Any) -> None:
            raise _StoppedError

        handle = self.unet.time_proj.register_forward_pre_hook(stop, prepend=True)
        start = time.perf_counter()
        try:
            self.call(step)
        except _StoppedError:
            return time.perf_counter() - start
        finally:
            handle.remove()
        raise AssertionError("the UNet has a time_proj")


class _StoppedError(Exception):
    """Ends a call at its first operation."""


def host(
    *,
    model: str = "sd15",
    sizes: Sequence[Size] = (512,),
    methods: Sequence[str | PatchConfig] | None = None,
    batch: int = 2,
    steps: int = 50,
    session: Session | None = None,
) -> Results:
    """Count operations and measure the host's time for the untouched UNet, tomesd and every method, by phase.

    Args:
        model: name of a UNet's shape.
        sizes: of the image, as for `unet`.
        methods: as for `resolve_methods`; all presets by default.
        batch: rows of the UNet's batch.
        steps: of a run.
        session: where the results go.

    Returns:
        Machine, settings, and a row for each phase: how many layers are patched, the `operations` of a layer beyond
        those of the untouched one (the mean of `COUNTED` steps), the `seconds` of a layer and step before the first
        operation (the median over the phase), and the `first` ones, of the step that draws for the others.
    """
    configs = resolve_methods((PEER, *METHODS) if methods is None else methods)
    line_up(configs, by_phase=True)  # refuses what differs by step
    asked = {"model": model, "batch": batch, "steps": steps, "methods": [config.to_dict() for config in configs]}
    record = (session or Session()).begin("host", torch.device("cpu"), asked, bases=[])
    for size in sizes:
        calls = Calls(model, size, batch, steps)
        untouched = calls.operations(0), statistics.median(calls.seconds(range(steps)))
        for done, config in enumerate(configs):
            record.progress(config.method, done, len(configs))
            rows = _rows(Calls(model, size, batch, steps), config, steps, untouched)
            common.keep_rows(record, {"size": size, "method": config.method}, rows)
    return record.results


def _rows(calls: Calls, config: PatchConfig, steps: int, untouched: tuple[int, float]) -> list[dict[str, Any]]:
    """Return a row for each phase of a method that is not exact."""
    peer = is_peer(config.method)
    config = fitted(config, {"unet": main_denoiser(calls.unet)})
    layers = find_layers(calls.unet)
    layers = select_layers(layers, config, levels_of(layers))
    if peer:
        Variant(PEER, config).install(calls.unet)
    else:
        apply_patch(calls.unet, config)
    by_phase: dict[Phase, list[int]] = {}
    for step in range(steps):
        phase = config.phase_at(step, steps)
        by_phase.setdefault(EXACT if phase.exact else phase, []).append(step)
    by_phase.pop(EXACT, None)
    rows = []
    for phase, own in by_phase.items():
        times = [(each - untouched[1]) / len(layers) for each in calls.seconds(own)]
        counted = [calls.operations(step) - untouched[0] for step in own[:COUNTED]]
        row = {"method": config.method, "what": describe(phase), "layers": len(layers)}
        row |= {"operations": statistics.fmean(counted) / len(layers), "seconds": statistics.median(times)}
        rows.append(row | {"first": times[0]})
    return rows


if __name__ == "__main__":
    parser = common.options(__doc__, "size", "method", "batch")
    parser.add_argument("--model", choices=UNET_NAMES, default="sd15", help="nothing is allocated")
    parser.add_argument("--steps", type=int, default=50)
    chosen = parser.parse_args()
    sizes, methods = [*map(read_size, chosen.size or ["512"])], common.methods(chosen.method)
    common.run(chosen, host, model=chosen.model, sizes=sizes, methods=methods, batch=chosen.batch, steps=chosen.steps)
