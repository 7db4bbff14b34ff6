"""Time and memory of the methods, side by side in one run.

Every variant runs on its own copy of the model; the weights are shared. All variants run once in each round, and ratios
are taken within a round, so that a machine whose clock drifts slows all of them alike.
"""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import itertools
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import elfatt_sd
from elfatt_sd import errors as checks
from elfatt_sd.attention.ordering import BLOCK_ORDERS, Grid
from elfatt_sd.benchmarking import variants
from elfatt_sd.benchmarking.report import Results, Session
from elfatt_sd.benchmarking.variants import PEER, UNPATCHED, Size, Variant, height_and_width, line_up, resolve_methods
from elfatt_sd.config import PatchConfig
from elfatt_sd.devices import standard_normal
from elfatt_sd.drawing.studio import check_steps, dimensions_of, exact_size, warn_if_too_large
from elfatt_sd.errors import ElfattError, need
from elfatt_sd.families import SelfAttention, copy_structure, family_of, main_denoiser, step_denoisers, unwrap
from elfatt_sd.families.base import PlainProjections
from elfatt_sd.families.shapes import SHAPES, UNET_NAMES, Dimensions, empty_model
from elfatt_sd.loading import load_pipeline, pick_device, pick_dtype
from elfatt_sd.measure import Call, peak_memory
from elfatt_sd.methods import Blocks, Draws, Softmax, attentions, is_own
from elfatt_sd.nn import ElfattAttention
from elfatt_sd.nn.backbone import ATTENTIONS
from elfatt_sd.phases import EXACT, Backend, Phase
from elfatt_sd.runtime.call import Call as PatchCall
from elfatt_sd.runtime.call import LayerCall, attend
from elfatt_sd.runtime.denoiser import Patch
from elfatt_sd.runtime.joint_processor import Projected
from elfatt_sd.runtime.layer import Layers
from elfatt_sd.runtime.processor import LayerInCall, approximate

Move = Callable[[Tensor], Tensor]
MakeCall = Callable[[Any, Mapping[str, Any], Variant], Call]
CHANNELS, HEADS = 320, 8  # of the finest level of SD 1.5
AGENTS = 64
ORDERS = [order for order in BLOCK_ORDERS if order != "sequence"]  # without merging, that is `raster`
_PEER = f"{PEER} 0.5"
VAE: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "latent_channels": 4,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "force_upcast": False,
}


@dataclass(frozen=True)
class Model:
    unet: nn.Module  # the denoiser, a UNet or a transformer of a known family
    scale: int  # pixels of the image to one of the latent, on each side

    def inputs(self, size: Size, batch: int) -> dict[str, Any]:
        """Return the keyword arguments of a UNet call for images of `size` pixels."""
        height, width = height_and_width(size)
        parameter = next(self.unet.parameters())
        generator = torch.Generator().manual_seed(0)
        module = unwrap(self.unet)
        family = family_of(module)
        latent = Grid(family.latent(module).frames, height // self.scale, width // self.scale)
        noise = lambda *shape: standard_normal(shape, generator).to(parameter)  # noqa: E731
        return family.arguments(module, family.grid(module, latent), batch, noise)


def unet_call(unet: nn.Module, inputs: Mapping[str, Any]) -> Callable[[], Any]:
    """Return a function that calls a denoiser, without gradients; its sample by position, as tomesd wants it."""
    (_, sample), *others = inputs.items()
    return torch.inference_mode()(lambda: unet(sample, **dict(others)).sample)


def make_model(
    name: str, device: torch.device, dtype: torch.dtype, variant: str | None = None, sizes: Sequence[Size] = ()
) -> Model:
    """Build a model of a known shape with random weights, or take a pipeline's (`toy`, a path, a hub id).

    Of a transformer, a few blocks are built: the whole of one fits few machines, and its blocks are alike.
    """
    shape = SHAPES.get(name)
    pipe = None if shape else load_pipeline(name, device=str(device), dtype=dtype, variant=variant)
    dimensions = Dimensions.of(empty_model(shape, few=True), shape.scale) if shape else dimensions_of(pipe)
    for size in sizes:
        dimensions.check(*height_and_width(size))
    return Model(fill(empty_model(shape, few=True), device, dtype) if shape else main_denoiser(pipe), dimensions.factor)


def make_pipeline(
    name: str, device: torch.device, dtype: torch.dtype, batch: int, variant: str | None = None
) -> tuple[Any, dict[str, Any]]:
    """Return a pipeline and its inputs; one with random weights is given embeddings."""
    if name in SHAPES and name not in UNET_NAMES:
        raise ElfattError(f"model={name!r} has no pipeline here; time a call of it with elfatt-sd bench denoiser.")
    if name not in SHAPES:
        pipe = load_pipeline(name, device=str(device), dtype=dtype, variant=variant)
        return pipe, {"prompt": ["a red circle"] * batch}
    import diffusers

    library: Any = diffusers
    kind = library.StableDiffusionXLPipeline if name == "sdxl" else library.StableDiffusionPipeline
    with torch.device("meta"):
        vae = library.AutoencoderKL(**VAE)
    model, scheduler = make_model(name, device, dtype), library.DDIMScheduler(steps_offset=1, clip_sample=False)
    parts = dict.fromkeys(inspect.signature(kind).parameters)  # None where nothing is needed: of text, of safety
    parts |= {"unet": model.unet, "vae": fill(vae, device, dtype), "scheduler": scheduler}
    example = model.inputs(8 * model.scale, batch)
    inputs = {"prompt_embeds": example["encoder_hidden_states"]}
    if name == "sdxl":
        inputs["pooled_prompt_embeds"] = example["added_cond_kwargs"]["text_embeds"]
    inputs |= {f"negative_{each}": torch.zeros_like(value) for each, value in inputs.items()}
    return kind(**parts), inputs


def fill(module: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Draw the weights of a module on the meta device, there: uniform by fan-in, norms 1, biases 0."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    module = module.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim > 1:
                bound = parameter[0].numel() ** -0.5
                parameter.uniform_(-bound, bound, generator=generator)
            else:
                parameter.fill_(float(name.endswith("weight")))
        for buffer in module.buffers():  # of positions, for instance
            buffer.uniform_(-1, 1, generator=generator) if buffer.is_floating_point() else buffer.zero_()
    return module.requires_grad_(False).eval()


def layer(
    *,
    tokens: Sequence[int] = (4096, 16384),
    batch: int = 2,
    repeats: int = 5,
    device: str = "auto",
    dtype: str = "auto",
    block_size: int = 128,
    max_seconds: float = math.inf,
    memory: bool = True,
    kind: str = "layer",
    attention: Sequence[str] = (),
    session: Session | None = None,
) -> Results:
    """Time one self-attention layer of SD 1.5's finest level: the attention itself, and the layer with projections.

    What a method draws at random for each step is part of its layer's time. With `attention`, names of `elfatt_sd.nn`,
    a layer of a ViT-S with each of them is timed instead: forward, with backward, and how these grow.
    """
    place = pick_device(device)
    precision = pick_dtype(dtype, place)
    sides = {count: variants.grid_side(count) for count in sorted(tokens)}
    Blocks(block_size)  # checks it
    made_by: Any = functools.partial(_module_calls, attention) if attention else layer_calls
    make = functools.partial(made_by, batch=batch, block_size=block_size, device=place, dtype=precision)
    settings = {"dtype": str(precision).removeprefix("torch."), "block_size": block_size}
    settings["max_seconds"] = max_seconds if math.isfinite(max_seconds) else None
    record = (session or Session()).begin(kind, place, settings, bases=[Softmax.name, _PEER])
    parts = ((count, *part) for count, side in sides.items() for part in make(side).items())
    for count, part, made in parts:
        calls = {name: torch.inference_mode()(call) for name, call in made.items()}
        key = {"tokens": count, "batch": batch, "part": part}
        # A call's time is expected from that of the last size, as if its cost were quadratic.
        smaller = [row for row in record.results["rows"] if row["part"] == part and row["tokens"] < count]
        expected = {row["method"]: row["seconds"] * (count / row["tokens"]) ** 2 for row in smaller}
        if slow := [name for name in calls if expected and expected.get(name, math.inf) > max_seconds]:
            warnings.warn(
                f"elfatt-sd: {count} tokens, {part}: {', '.join(slow)} left out, as a call may take more than "
                f"max_seconds={max_seconds:g}.",
                stacklevel=2,
            )
            calls = {name: call for name, call in calls.items() if name not in slow}
        if calls:
            record.time(key, calls, repeats)
        for name in calls if memory else ():
            record.keep_peak(key, name, batch, functools.partial(peak_memory, calls[name], place))
    if attention and len(sides) > 1:
        rows = record.results["rows"]
        record.results["growth"] = {row["part"]: _growth(rows, row["part"]) for row in rows}
    return record.results


def _growth(rows: Sequence[Mapping[str, Any]], part: str) -> dict[str, float]:
    """Return, by method, the slope of time over tokens in double logarithm."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["part"] == part:
            points.setdefault(row["method"], []).append((math.log(row["tokens"]), math.log(row["seconds"])))
    known = {name: zip(*each, strict=True) for name, each in points.items() if len(each) > 1}
    return {name: statistics.linear_regression(*axes).slope for name, axes in known.items()}


def _module_calls(
    names: Sequence[str], side: int, batch: int, block_size: int, device: torch.device, dtype: torch.dtype
) -> dict[str, dict[str, Call]]:
    x = standard_normal((batch, side * side, 384), torch.Generator().manual_seed(0)).to(device, dtype)

    def step(module: nn.Module) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            module.requires_grad_().zero_grad()
            module(x.clone().requires_grad_()).square().mean().backward()

    calls: dict[str, dict[str, Call]] = {"forward": {}, "training step": {}}
    for name in names:
        checks.choice("attention", name, ATTENTIONS)
        with torch.device("meta"):
            empty = ElfattAttention(384, 6, True, **{"block_size": block_size, **ATTENTIONS[name]})
        module = fill(empty, device, dtype)
        calls["forward"][name] = functools.partial(module, x)
        calls["training step"][name] = functools.partial(step, module)
    return calls


def layer_phases(block_size: int) -> dict[str, Phase]:
    """Return what a layer is timed with: every block order, every attention, with and without merging.

    A part of a name after a comma is an order. Attentions that others registered are there by their own names.
    """
    phases = {f"block, {each}": Phase(1.0, "block", block_size=block_size, block_order=each) for each in ORDERS}
    phases["cell_spread"] = Phase(1.0, "cell_spread", block_size=block_size, block_order="spread")
    phases["sampled"] = Phase(1.0, "sampled", block_size=block_size)
    phases["agents"] = Phase(1.0, "agent", agents=AGENTS)
    for merging, ratio in {"": 0.0, " on tome 0.5": 0.5}.items():
        halves = Phase(1.0, "elfatt", ratio=ratio, block_size=block_size, agents=AGENTS)
        phases[f"elfatt{merging}"] = halves
        phases[f"elfatt{merging}, spread"] = halves.with_settings({"block_order": "spread"})
    phases["tome 0.5"] = Phase(1.0, "softmax", ratio=0.5)
    return phases | {name: Phase(1.0, kind()) for name, kind in attentions().items() if not is_own(kind)}


def layer_calls(
    side: int, batch: int, block_size: int, device: torch.device, dtype: torch.dtype
) -> dict[str, dict[str, Call]]:
    """Return the calls of a layer by part: its attention alone, which no order changes, and the whole layer."""
    from diffusers.models.attention_processor import Attention

    x = standard_normal((batch, side * side, CHANNELS), torch.Generator().manual_seed(0)).to(device, dtype)
    block_input = x.mT.contiguous().mT  # channels first, as in a UNet
    with torch.device("meta"):
        empty = Attention(CHANNELS, heads=HEADS, dim_head=CHANNELS // HEADS)
    attention, grid = fill(empty, device, dtype), Grid.image(side, side)
    projected = Projected(*PlainProjections(attention, x).project(x))

    def merged_by_peer() -> Tensor:
        merge, unmerge = tomesd_matching(block_input, side, 0.5, 2)
        return unmerge(attention(merge(x)))

    def step(state: LayerCall, phase: Phase) -> Tensor:  # what a layer costs in a denoising step: draw, then attend
        state.begin(phase, 0, x.device)
        state.block_input = block_input
        return approximate(PlainProjections(attention, x), state, phase, x)

    alone: dict[str, Call] = {}
    whole: dict[str, Call] = {Softmax.name: functools.partial(attention, x), _PEER: merged_by_peer}
    layer = SelfAttention("layer", attention, None, 1)
    for name, phase in {Softmax.name: EXACT, **layer_phases(block_size)}.items():
        patch = Patch(PatchConfig(phases=(phase,)), Layers([layer], [layer]))
        state = LayerCall(patch.layers[0], PatchCall(patch.config), grid)
        whole.setdefault(name, functools.partial(step, state, phase))
        if not phase.merge.ratio and (short := name.split(",")[0]) not in alone:
            prepared = phase.attention.prepare(grid, Draws(0, 0, 0, device))
            seen = LayerInCall(projected, state, x, phase)
            alone[short] = functools.partial(attend, phase.attention, seen, x, prepared)
    return {"attention": alone, "layer": whole}


def tomesd_matching(metric: Tensor, side: int, ratio: float, stride: int) -> tuple[Move, Move]:
    need("peer 'tomesd'", "tomesd")
    from tomesd.merge import bipartite_soft_matching_random2d

    cells, merged = (side, side, stride, stride), int(metric.shape[1] * ratio)
    matching: tuple[Move, Move] = bipartite_soft_matching_random2d(metric, *cells, merged, no_rand=True)
    return matching


def unet(
    model: str | Model = "sd15",
    *,
    sizes: Sequence[Size] = (512, 1024),
    methods: Iterable[str | PatchConfig] | None = None,
    batch: int = 2,
    repeats: int = 5,
    device: str = "auto",
    dtype: str = "auto",
    compile: bool = False,
    autotune: bool = False,
    graphed: MakeCall | None = None,  # makes a call that replays a CUDA graph; see benchmarks/graphs.py
    competitors: Sequence[Backend] = (),
    memory: Sequence[int] | None = None,
    seconds: float = math.inf,
    variant: str | None = None,
    session: Session | None = None,
    **settings: Any,
) -> Results:
    """Time one UNet call in every phase of every method, and add them up over a run of 50 steps."""
    place = pick_device(device)
    precision = pick_dtype(dtype, place)
    batches = (batch, 2 * batch) if memory is None else memory
    chosen = resolve_methods(methods, **settings)
    made = model if isinstance(model, Model) else make_model(model, place, precision, variant, sizes)
    end = variants.COMPILED * compile + variants.AUTOTUNED * autotune
    lineup = line_up(chosen, made.unet, by_phase=True, named=methods is not None, ending=end, competitors=competitors)
    about: dict[str, Any] = {
        "model": model if isinstance(model, str) else "given",
        "dtype": str(precision).removeprefix("torch."),
        "graphs": graphed is not None,
        "variants": lineup.described(),
        **({"variant": variant} if variant else {}),
    }
    bases = UNPATCHED, PEER, UNPATCHED + variants.COMPILED
    record = (session or Session()).begin("unet", place, about, **lineup.details(bases))
    keys = [{"size": size, "batch": batch} for size in sizes]

    def lose(name: str, error: Exception) -> None:
        for key in keys:
            record.lose(key, name, error)

    units = units_of(made, lineup.variants, lose)
    measured = [name for name, variant in lineup.variants.items() if name in units and variant.kind != variants.FLOOR]
    for key in keys:
        inputs = made.inputs(key["size"], batch)
        calls = {
            name: graphed(unit, inputs, lineup.variants[name]) if graphed else unet_call(unit, inputs)
            for name, unit in units.items()
        }
        record.time(key, calls, repeats, seconds=seconds)
    gc.collect()
    gc.freeze()  # copies of a model take seconds whenever garbage is looked for
    for key, name, rows in itertools.product(keys, measured, batches):
        call = unet_call(units[name], made.inputs(key["size"], rows))
        record.keep_peak(key, name, rows, functools.partial(_peak, units[name], call, lineup.variants[name], place))
    gc.unfreeze()
    return record.results


def units_of(made: Model, by_name: Mapping[str, Variant], lose: Callable[[str, Exception], object]) -> dict[str, Any]:
    """Put every variant on its own copy of the model; what cannot be put there is lost."""
    units: dict[str, Any] = {}
    for name, variant in by_name.items():
        try:
            units[name] = variant.install(copy_structure(made.unet))
        except Exception as error:
            lose(name, error)
    if any(variant.compiled for variant in by_name.values()):
        # The copies share the code of their class, so that each is an entry in the cache of what it was compiled to.
        import torch._dynamo

        config: Any = torch._dynamo.config
        limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # before PyTorch 2.6
        setattr(config, limit, max(getattr(config, limit), 16 * len(units)))
    return {
        name: torch.compile(unit, dynamic=False) if by_name[name].compiled else unit for name, unit in units.items()
    }


def _peak(unet: Any, call: Call, variant: Variant, device: torch.device) -> int | None:
    """Measure the peak memory of a call, with all that it keeps for later ones."""
    if variant.compiled:
        peak_memory(call, device)  # compiles
    variants.forget_residuals(unet)
    for kept in variants.latest_calls(unet):
        kept.matchings.clear()
    return peak_memory(call, device)


def pipeline(
    model: str = "toy",
    *,
    sizes: Sequence[Size] = (),
    methods: Iterable[str | PatchConfig] | None = None,
    batch: int = 1,
    repeats: int = 5,
    steps: int = 25,
    memory: bool = True,
    graphs: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    variant: str | None = None,
    session: Session | None = None,
    **settings: Any,
) -> Results:
    """Time a whole pipeline with guidance, from text (or its embedding, with random weights) to images."""
    place = pick_device(device)
    precision = pick_dtype(dtype, place)
    chosen = resolve_methods(methods, **settings)
    pipe, inputs = make_pipeline(model, place, precision, batch, variant)
    pipe.set_progress_bar_config(disable=True)
    check_steps(pipe, steps)
    lineup = line_up(chosen, main_denoiser(pipe), by_phase=False, named=methods is not None)
    twins = {name: twin(pipe, each) for name, each in lineup.variants.items()}
    for name, each in lineup.variants.items() if graphs else ():
        if each.kind in (UNPATCHED, "patch"):
            elfatt_sd.graphs(twins[name], say=functools.partial(print, file=sys.stderr))
    about: dict[str, Any] = {"model": model, "dtype": str(precision).removeprefix("torch."), "steps": steps}
    about |= {"variants": lineup.described(), **({"variant": variant} if variant else {})}
    about |= {"graphs": True} if graphs else {}
    record = (session or Session()).begin("pipeline", place, about, **lineup.details((UNPATCHED, PEER)))
    if not sizes:
        height, width = dimensions_of(pipe).own
        sizes = (width if height == width else f"{width}x{height}",)
    for size in sizes:
        dimensions_of(pipe).check(*height_and_width(size))
        warn_if_too_large(pipe, *height_and_width(size), rows=2, batch=batch)
    memory = memory and not graphs  # whose replays allocate nothing
    measured = [name for name, each in lineup.variants.items() if memory and each.kind != variants.FLOOR]
    for size in sizes:
        calls = {name: functools.partial(_run, each, inputs, size, steps) for name, each in twins.items()}
        few = steps if graphs else min(steps, 5)
        warm_up = {name: functools.partial(_run, each, inputs, size, few) for name, each in twins.items()}
        key = {"size": size, "batch": batch}
        record.time(key, calls, repeats, warm_up=warm_up)
        for name in measured:
            record.keep_peak(key, name, batch, functools.partial(peak_memory, calls[name], place))
    return record.results


def twin(pipe: Any, variant: Variant) -> Any:
    other = copy.copy(pipe)
    for name, denoiser in step_denoisers(pipe).items():
        setattr(other, name, copy_structure(denoiser))
    return variant.install(other)


def _run(pipe: Any, inputs: dict[str, Any], size: Size, steps: int) -> Any:
    given = {**inputs, **exact_size(pipe, *height_and_width(size)), "generator": torch.Generator().manual_seed(0)}
    return pipe(**given, num_inference_steps=steps, output_type="pt")
