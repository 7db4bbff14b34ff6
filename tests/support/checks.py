"""What tests of several folders compare, count and give."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from support import tiny_pipelines as tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import elfatt_sd
from elfatt_sd.attention import softmax
from elfatt_sd.config import METHODS, PatchConfig, Phase
from elfatt_sd.families import find_denoisers, find_layers, main_denoiser, step_denoisers, unwrap
from elfatt_sd.methods import Grid
from elfatt_sd.runtime import joint_processor, processor
from elfatt_sd.runtime.call import Call, LayerCall
from elfatt_sd.runtime.denoiser import Patch
from elfatt_sd.runtime.layer import Layers
from elfatt_sd.runtime.processor import ElfattProcessor
from elfatt_sd.runtime.schedule import Position

TWO_PHASES = PatchConfig(
    "two", (Phase(0.5, "elfatt", ratio=0.5, block_size=16, agents=8), Phase(1.0, "softmax", ratio=0.5))
)
STEPS: dict[str, Any] = {"num_inference_steps": 4, "output_type": "latent"}


def set_clock(monkeypatch: pytest.MonkeyPatch, seconds: Sequence[float]) -> None:
    """Have the stopwatches read these times, one after the other."""
    readings = iter([moment for second in seconds for moment in (0.0, float(second))])
    stopped = SimpleNamespace(perf_counter=lambda: next(readings), monotonic=time.monotonic)
    monkeypatch.setattr("elfatt_sd.measure.time", stopped)


def counting(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, says: Any = lambda *given: 1) -> list[Any]:
    """Have each call of a function add what it says of its arguments to a list."""
    seen: list[Any] = []
    original = getattr(place, name)
    monkeypatch.setattr(place, name, lambda *given, **own: (seen.append(says(*given)), original(*given, **own))[1])
    return seen


@contextmanager
def stopped_at(home: Any, name: str, where: Callable[..., bool] = lambda *_: True) -> Iterator[None]:
    """Stop the block where it comes to a function, perhaps only at some of its calls."""

    def stop(*given: Any) -> None:
        if where(*given):
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
        counting(patched, home, name, stop)
        yield


class Work(TorchDispatchMode):
    """Counts copies, sorts, dense products, calls of fused attention, pairs of queries and keys; the largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = self.calls = self.pairs = self.dense = self.partitions = self.largest = 0
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
        made = func(*args, **(kwargs or {}))
        self.largest = max(self.largest, made.numel() if isinstance(made, Tensor) else 0)
        return made


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def runner(pipe: Any, prompt: str = "a cat", **options: Any) -> Callable[[], torch.Tensor]:
    """Return a function that makes the same picture whenever it is called."""

    def run() -> torch.Tensor:
        with torch.no_grad():
            return torch.as_tensor(pipe(prompt, generator=generator(), **{**STEPS, **options})[0])

    return run


def picture(height: int = 32, width: int = 32, channels: int = 3) -> torch.Tensor:
    return torch.rand(1, channels, height, width, generator=generator())


def with_effect(method: Any, **settings: Any) -> Any:
    """Those of some settings that change something in a method."""
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
        calls[id(joint._state.layer.attention), joint._state.phase.attention.name] += 1
        return approximated(joint, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processor, "approximate", count)
        patch.setattr(joint_processor._Joint, "approximated", count_joint)
        yield calls


def processors(pipe: Any) -> dict[str, Any]:
    """Every attention processor of a pipeline's denoisers."""
    return {
        f"{name}.{place}": module.processor
        for name, net in find_denoisers(pipe).items()
        for place, module in unwrap(net).named_modules()
        if hasattr(module, "processor")
    }


ACTIVE = [method for method in METHODS if method != "sd"]


def picture_of(pipe: Any, steps: int = 3, **options: Any) -> torch.Tensor:
    given = {"prompt": "a b", "guidance_scale": 3.0, "generator": torch.Generator().manual_seed(5), **options}
    return pipe(num_inference_steps=steps, output_type="pt", **given).images


def elfatt_processors(net: torch.nn.Module) -> list[str]:
    """Names of the layers that have our processor."""
    modules = net.named_modules()
    return [name for name, module in modules if isinstance(getattr(module, "processor", None), ElfattProcessor)]


ROWS = COLUMNS = 16  # of a small UNet's latents


def inputs(dtype: torch.dtype = torch.float64, batch: int = 2, side: int = ROWS) -> tuple[Tensor, Tensor]:
    """Sample and text."""
    sample = torch.randn(batch, 4, side, side, generator=generator(), dtype=torch.float64)
    text = torch.randn(batch, 5, tiny.TEXT_WIDTH, generator=generator(), dtype=torch.float64)
    return sample.to(dtype), text.to(dtype)


@torch.no_grad()
def denoise(unet: Any, steps: int, side: int = 8, device: str = "cpu") -> Tensor:
    """Call a UNet once for every step of a schedule and return what it gave."""
    scheduler, (sample, text) = tiny.ddim(), (each.to(device) for each in inputs(torch.float32, side=side))
    scheduler.set_timesteps(steps, device=device)
    return torch.stack([unet(sample, each, text, return_dict=False)[0].clone() for each in scheduler.timesteps])


SAMPLE = torch.zeros(2, 4, 16, 16)


def state_of(pipe: Any, config: PatchConfig) -> LayerCall:
    """State of the first layer on the finest grid, as a patch would make it."""
    layer = next(layer for layer in find_layers(pipe.unet) if layer.downsample == 1)
    patch = Patch(config, Layers([layer], [layer]))
    return LayerCall(patch.layers[0], Call(config), layer.grid(Grid.image(*SAMPLE.shape[-2:])))


# Queries, keys and values, and every approximation of them.

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
LENGTHS = [1, 2, 7, 64, 100, 227, 257]


def qkv(tokens: int, heads: int = 4, size: int = 8, batch: int = 2, dtype: torch.dtype = torch.float32) -> Any:
    return torch.randn(3, batch, tokens, heads, size, generator=torch.Generator().manual_seed(tokens)).to(dtype)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=0)


def approximations(q: Tensor, k: Tensor, v: Tensor, **kernel: Any) -> dict[str, Tensor]:
    halves = {"agents": 6, "block_size": 30, **kernel}
    return {
        "softmax": softmax.softmax_attention(q, k, v, **kernel),
        "block": softmax.block_attention(q, k, v, 30, **kernel),
        "agent": softmax.agent_attention(q, k, v, softmax.pool_agents(q, 6), value_shortcut=0.1, **kernel),
        **{split: softmax.elfatt_attention(q, k, v, split=split, **halves) for split in ("heads", "channels")},
    }


# What has to hold for every transformer that is patched and put back, through its pipeline's own `__call__`.

Run = Callable[..., torch.Tensor]  # makes the same latents whenever it is called; takes the pipeline's options
MANY = 10**6  # more than any small grid has tokens
ALL_KEYS = {
    "sampled": Phase(1.0, "sampled", keys=MANY, groups=1),
    "cell_spread": Phase(1.0, "cell_spread", block_size=MANY),
    "cell_spread, cells": Phase(1.0, "cell_spread", block_size=MANY, cell=4),
    "cell_spread, one cell": Phase(1.0, "cell_spread", block_size=16, cell=MANY),
    "block": Phase(1.0, "block", block_size=MANY, block_order="windows"),
    "elfatt": Phase(1.0, "elfatt", block_size=MANY, agent_share=0.0),
}
FEW_KEYS = {
    "sampled": Phase(1.0, "sampled", keys=8),
    "cell_spread": Phase(1.0, "cell_spread", block_size=8),
    "cell_spread, cells": Phase(1.0, "cell_spread", block_size=16, cell=8),
    "block": Phase(1.0, "block", block_size=8, block_order="curve"),
    "elfatt": Phase(1.0, "elfatt", block_size=8, agents=4, block_order="windows"),
    "agent": Phase(1.0, "agent", agents=4, block_order="windows"),
}
HALF = PatchConfig("half", (Phase(0.5, "cell_spread", block_size=8),))


def check_all_keys(pipe: Any, run: Run, atol: float = 1e-5) -> None:
    """What sees all keys equals the original processors' output."""
    untouched = run()
    for name, phase in ALL_KEYS.items():
        with elfatt_sd.patched(pipe, PatchConfig("all", (phase,))), recorded() as calls:
            found = run()
        assert calls, name
        torch.testing.assert_close(
            found, untouched, atol=atol, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def check_methods(pipe: Any, run: Run, merges: bool = False) -> None:
    """Every attention changes the image, repeats itself, and is taken back: the same processors, the same bits."""
    before = {id(layer.attention): layer.attention.processor for layer in all_layers(pipe)}
    untouched = run()
    for name, phase in {**FEW_KEYS, **({"merged": Phase(1.0, ratio=0.5)} if merges else {})}.items():
        elfatt_sd.apply_patch(pipe, PatchConfig("few", (phase,)))
        found = run()
        assert torch.isfinite(found).all(), name
        assert not torch.equal(found, untouched), name
        assert torch.equal(run(), found), name
        elfatt_sd.remove_patch(pipe)
    assert all(layer.attention.processor is before[id(layer.attention)] for layer in all_layers(pipe))
    assert torch.equal(run(), untouched)


def check_steps(pipe: Any, run: Run, layers: int, calls: int = 1, counts: tuple[int, ...] = (1, 4, 28)) -> None:
    """Phases follow the true step, in runs in a row and after an interrupted one; `layers` are of all denoisers."""

    def stop(*_: Any) -> None:
        ends.append(0)
        if len(ends) == 3:
            raise KeyboardInterrupt  # in the second call

    with elfatt_sd.patched(pipe, HALF):
        for steps in counts:
            wanted = [layers * (step < 0.5 * steps) for step in range(steps) for _ in range(calls)]
            for _ in range(2 if steps < 10 else 1):
                ends = [0]  # approximated layers up to the end of each call, ControlNets before it included
                with recorded() as seen, contextlib.ExitStack() as stack:
                    for denoiser in step_denoisers(pipe).values():
                        handle = denoiser.register_forward_hook(lambda *_, ends=ends: ends.append(sum(seen.values())))
                        stack.callback(handle.remove)
                    run(num_inference_steps=steps)
                assert [after - before for before, after in itertools.pairwise(ends)] == wanted, f"{steps} steps"
        ends = [0]
        handle = main_denoiser(pipe).register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            run(num_inference_steps=6)
        handle.remove()
        with recorded() as seen:
            run(num_inference_steps=4)
        assert sum(seen.values()) == layers * calls * 2, "after an interrupted run"


def check_plan(pipe: Any, tokens: int, layers: int, *, counted: bool = True, **size: Any) -> None:
    """A plan knows the layers, their tokens and, but for models that read values, what a call costs."""
    plan = elfatt_sd.plan(pipe, HALF, **size)
    patched = [layer for layer in plan.layers if layer.patched]
    assert [layer.tokens for layer in patched] == [tokens] * layers
    if not counted:
        assert "not counted" in str(plan.call)
        return
    assert plan.call.before is not None and plan.call.after is not None
    assert 0 < plan.call.after < plan.call.before


def all_layers(pipe: Any) -> list[Any]:
    return [layer for denoiser in find_denoisers(pipe).values() for layer in find_layers(denoiser)]


# Schedulers by name, and where a timestep is on their schedule.

_KARRAS: list[dict[str, Any]] = [{}, {"use_karras_sigmas": True}]
_BY_NAME: dict[str, list[dict[str, Any]]] = {
    **{"DDIM": [{}], "DDPM": [{}], "PNDM": [{"skip_prk_steps": True, "steps_offset": 1}], "EulerDiscrete": _KARRAS},
    **{"EulerAncestralDiscrete": [{}], "HeunDiscrete": _KARRAS, "KDPM2Discrete": _KARRAS},
    "DPMSolverMultistep": [*_KARRAS, *({"algorithm_type": "sde-dpmsolver++", **more} for more in _KARRAS)],
    **{"UniPCMultistep": _KARRAS, "LCM": [{}]},
}
SCHEDULERS = [(f"{name}Scheduler", extra) for name, extras in _BY_NAME.items() for extra in extras]
IDS = [name + "".join(f"-{value}" for value in extra.values()) for name, extra in SCHEDULERS]


def scheduler(name: str, extra: dict[str, Any]) -> Any:
    return getattr(diffusers, name)(**tiny.SD15_SCHEDULE, **extra)


def place(value: float) -> Position:
    return Position(int(999 - value), 1000, False)


def steps(count: int, first: int = 0, calls: int = 1) -> list[Position | None]:
    """The places of all calls of a run."""
    return [Position(step, count) for step in range(first, count) for _ in range(calls)]


# A stand-in for CUDA graphs: operations on a CPU are done again, without any Python in between.

WAITS = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero")  # for the device: a capture forbids it


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.done: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.split(".")[0] in WAITS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        self.done.append((func, args, kwargs or {}, func(*args, **(kwargs or {}))))
        return self.done[-1][3]


class Recorded:
    """A graph whose replay writes into the memory that the capture wrote into."""

    made: list[Recorded] = []  # noqa: RUF012

    def __init__(self, device: torch.device, pool: Any) -> None:
        self.pool = object() if pool is None else pool
        self.replays = 0
        self.made.append(self)

    def capture(self, function: Any) -> Any:
        with Recorder() as recorder:
            output = function()
        self.done = recorder.done
        return output

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, before in self.done:
            for old, new in zip(tree_leaves(before), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.untyped_storage()._cdata != new.untyped_storage()._cdata:
                    old.copy_(new)
