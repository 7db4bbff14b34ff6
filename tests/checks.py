"""What has to hold for every pipeline that is patched and put back."""

from __future__ import annotations

import importlib.util
import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_pipelines as tiny
import torch
from diffusers.models.attention_processor import Attention
from torch.utils._python_dispatch import TorchDispatchMode

import elfatt_sd
from elfatt_sd.config import PatchConfig, Phase
from elfatt_sd.families import find_denoisers, find_layers, unwrap
from elfatt_sd.runtime import joint_processor, processor
from elfatt_sd.runtime.processor import ElfattProcessor

FIRST = Phase(0.5, "elfatt", ratio=0.5, block_size=16, agents=8)
TWO_PHASES = PatchConfig("two", (FIRST, Phase(1.0, "softmax", ratio=0.5)))
SEED = 7
STEPS: dict[str, Any] = {"num_inference_steps": 4, "output_type": "latent"}


def set_clock(monkeypatch: pytest.MonkeyPatch, seconds: Sequence[float]) -> None:
    """Have the stopwatches read these times, one after the other."""
    readings = iter([moment for second in seconds for moment in (0.0, float(second))])
    stopped = SimpleNamespace(perf_counter=lambda: next(readings), monotonic=time.monotonic)
    monkeypatch.setattr("elfatt_sd.measure.time", stopped)


def load_script(path: str) -> Any:
    """Import a script of the repository that is in no package."""
    place = Path(__file__).parents[1] / path
    spec = importlib.util.spec_from_file_location(place.stem, place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Work(TorchDispatchMode):
    """Counts copies, sorts, dense products, calls of fused attention, and the pairs of queries and keys of those."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = self.calls = self.pairs = self.dense = self.partitions = 0
        self.sorts: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if "scaled_dot_product" in name:
            batch, heads, queries, _ = args[0].shape
            self.calls += 1
            self.pairs += batch * heads * queries * args[1].shape[2]
        self.dense += name in ("_softmax", "bmm", "baddbmm", "mm")
        self.partitions += name == "topk"
        if name in ("sort", "argsort", "msort"):
            self.sorts.append(args[0].dtype)
        self.copies += name in ("copy_", "clone", "_to_copy", "cat", "index_select", "constant_pad_nd")
        return func(*args, **(kwargs or {}))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def runner(pipe: Any, prompt: str = "a cat", **options: Any) -> Callable[[], torch.Tensor]:
    """Return a function that makes the same picture whenever it is called."""

    def run() -> torch.Tensor:
        with torch.no_grad():
            return torch.as_tensor(pipe(prompt, generator=generator(), **{**STEPS, **options})[0])

    return run


def picture(height: int = 32, width: int = 32, channels: int = 3) -> torch.Tensor:
    return torch.rand(1, channels, height, width, generator=generator())


def with_effect(method: Any, **settings: Any) -> Any:
    """Return those of some settings that change something in a method."""
    without = PatchConfig.preset(method).without_effect(settings)
    return {name: value for name, value in settings.items() if name not in without}


def like(kind: Any, pipe: Any, **parts: Any) -> Any:
    """Another kind of pipeline with the same parts, some replaced."""
    takes = inspect.signature(kind).parameters
    kept = {name: part for name, part in pipe.components.items() if name != "image_encoder" and name in takes}
    if "requires_safety_checker" in takes:
        parts["requires_safety_checker"] = False
    return tiny.quiet(kind(**{**kept, **parts}))


@contextmanager
def recorded() -> Iterator[Counter[tuple[int, str]]]:
    """Count the approximated calls by layer object and attention while the block runs."""
    calls: Counter[Any] = Counter()
    approximate = processor.approximate

    def count(given: Any, state: Any, phase: Phase, tokens: torch.Tensor) -> torch.Tensor:
        calls[id(state.layer.attention), phase.attention.name] += 1
        return approximate(given, state, phase, tokens)

    approximated: Any = joint_processor._Joint.approximated

    def count_joint(joint: Any, *given: Any) -> torch.Tensor:
        state = joint._state
        calls[id(state.layer.attention), state.phase.attention.name] += 1
        mixed: torch.Tensor = approximated(joint, *given)
        return mixed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processor, "approximate", count)
        patch.setattr(joint_processor._Joint, "approximated", count_joint)
        yield calls


def processors(pipe: Any) -> dict[str, Any]:
    """Every attention processor of a pipeline's UNet and ControlNets."""
    return {
        f"{name}.{place}": module.processor
        for name, net in find_denoisers(pipe).items()
        for place, module in unwrap(net).named_modules()
        if isinstance(module, Attention)
    }


def patched_layers(pipe: Any) -> dict[str, list[str]]:
    """Names of the patched layers of each denoiser."""
    return {
        name: [layer.name for layer in find_layers(net) if isinstance(layer.attention.processor, ElfattProcessor)]
        for name, net in find_denoisers(pipe).items()
    }


def layer_calls(pipe: Any, calls: Counter[Any]) -> dict[str, dict[str, int]]:
    """Turn what `recorded` counted into calls by attention for every layer that had one."""
    named = {
        id(layer.attention): f"{net}.{layer.name}"
        for net, denoiser in find_denoisers(pipe).items()
        for layer in find_layers(denoiser)
    }
    found: dict[str, dict[str, int]] = {}
    for (attention, kind), number in calls.items():
        found.setdefault(named[attention], {})[kind] = number
    return found


def check_patch(
    pipe: Any, run: Callable[[], torch.Tensor], *, layers: dict[str, int], calls: tuple[int, int] = (2, 2)
) -> torch.Tensor:
    """Patch a pipeline, run it twice, put it back, run it once more.

    Args:
        pipe: the pipeline or UNet.
        run: makes a picture, always from the same noise.
        layers: how many layers are patched in each denoiser.
        calls: denoiser calls of one run in the first and in the second phase of `TWO_PHASES`.

    Returns:
        The patched picture.
    """
    before, untouched = processors(pipe), run()
    elfatt_sd.apply_patch(pipe, TWO_PHASES)
    patched = patched_layers(pipe)
    assert {name: len(names) for name, names in patched.items()} == layers
    with recorded() as counted:
        picture = run()
    first, second = calls
    expected = {"elfatt": first, "softmax": second}
    expected = {kind: number for kind, number in expected.items() if number}
    assert layer_calls(pipe, counted) == {f"{net}.{name}": expected for net, names in patched.items() for name in names}
    assert picture.isfinite().all()
    assert picture.shape == untouched.shape
    assert not torch.equal(picture, untouched)
    assert torch.equal(run(), picture)
    elfatt_sd.remove_patch(pipe)
    after = processors(pipe)
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert torch.equal(run(), untouched)
    return picture
