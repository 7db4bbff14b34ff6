"""Time and memory of the methods, side by side in one run.

Every variant runs on its own copy of the model (the weights are shared), all variants take turns within each round, and
ratios are taken within a round, so that a machine whose clock drifts slows all of them alike.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from elfatt_sd.config import BLOCK_ORDERS, EXACT, METHODS, ElfattError, PatchConfig, Phase
from elfatt_sd.layers import SelfAttention, find_layers, select_layers, unwrap
from elfatt_sd.pipelines import load_pipeline, pick_device, pick_dtype

Results = dict[str, Any]
_STEPS = 50

_SD15: dict[str, Any] = {
    "sample_size": 64,
    "block_out_channels": (320, 640, 1280, 1280),
    "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
    "attention_head_dim": 8,
    "cross_attention_dim": 768,
}
_SDXL: dict[str, Any] = {
    "sample_size": 128,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
    "use_linear_projection": True,
}
_VAE: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 4,
    "force_upcast": False,
}
_SHAPES = {"sd15": _SD15, "sdxl": _SDXL}
_LAYER_CHANNELS, _LAYER_HEADS = 320, 8  # of the finest level of SD 1.5


# Models and variants -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """A way to run a UNet.

    Attributes:
        kind: `untouched`, `tomesd` (the package), `floor` (the patched layers give zeros), or `patch`.
        config: of the patch; for `tomesd` its ratio and `floor` its layers are used.
    """

    kind: str
    config: PatchConfig = dataclasses.field(default_factory=PatchConfig)

    def install(self, unet: nn.Module) -> nn.Module:
        """Put the variant on a UNet that is as it was made."""
        from elfatt_sd.patch import apply_patch

        layers = find_layers(unet)
        levels = sorted({layer.downsample for layer in layers})
        chosen = select_layers(layers, self.config, levels)
        if self.kind == "patch":
            apply_patch(unet, self.config)
        elif self.kind == "tomesd":
            import tomesd

            deepest = max(layer.downsample for layer in chosen)
            tomesd.apply_patch(unet, ratio=self.config.phases[0].ratio, max_downsample=deepest)
        elif self.kind == "floor":
            for layer in chosen:
                layer.attention.set_processor(_NoAttention())  # type: ignore[arg-type]
        return unet


class _NoAttention:
    """A processor that leaves the layer out: what no attention can beat."""

    def __call__(self, attn: nn.Module, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.zeros_like(hidden_states)


UNTOUCHED = Variant("untouched")


@dataclass(frozen=True)
class Model:
    """A UNet and what its inputs look like.

    Attributes:
        unet: the denoiser.
        scale: pixels of the picture to one of the latent, on each side.
    """

    unet: nn.Module
    scale: int

    def inputs(self, size: int, batch: int) -> dict[str, Any]:
        """Return the keyword arguments of a UNet call for square pictures of `size` pixels."""
        config: Any = unwrap(self.unet).config
        parameter = next(self.unet.parameters())
        side = size // self.scale
        generator = torch.Generator().manual_seed(0)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(parameter)

        inputs: dict[str, Any] = {
            "timestep": torch.tensor(500, device=parameter.device),
            "encoder_hidden_states": noise(batch, 77, config.cross_attention_dim),
        }
        if config.addition_embed_type == "text_time":
            pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
            sizes = torch.tensor([[size, size, 0, 0, size, size]]).to(parameter).expand(batch, -1)
            inputs["added_cond_kwargs"] = {"text_embeds": noise(batch, pooled), "time_ids": sizes}
        return {"sample": noise(batch, config.in_channels, side, side), **inputs}


def make_model(name: str, device: torch.device, dtype: torch.dtype) -> Model:
    """Build a UNet with random weights (`sd15`, `sdxl`) or take a pipeline's (`toy`, a path, a hub id)."""
    if name in _SHAPES:
        return Model(random_unet(_SHAPES[name], device, dtype), 8)
    pipe = load_pipeline(name, device=str(device), dtype=dtype)
    return Model(pipe.unet, int(pipe.vae_scale_factor))


def random_unet(shape: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Build a UNet whose weights are drawn on the device, without a copy in float32."""
    import diffusers

    make: Any = diffusers.UNet2DConditionModel
    with torch.device("meta"):
        unet = make(**shape)
    filled: nn.Module = _fill(unet, device, dtype).eval()
    return filled


def _fill(module: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Draw the weights of a module on the meta device: uniform by fan-in, norms 1, biases 0."""
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
    return module.requires_grad_(False)


def copy_structure(module: nn.Module) -> nn.Module:
    """Copy a module without its weights: both have the same parameters and buffers."""
    shared = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(tensor): tensor for tensor in shared})


# Timing --------------------------------------------------------------------------------------------------------------


def interleave(
    calls: Mapping[str, Callable[[], Any]], repeats: int, device: torch.device, *, seconds: float = math.inf
) -> dict[str, list[float]]:
    """Time functions in turns, after a warm-up round that does not count.

    Args:
        calls: what to time, by name.
        repeats: rounds; every round runs all of them, each time starting with another one.
        device: that they run on; quick calls on an accelerator are repeated within a turn.
        seconds: start no further round past this time, once there is one.

    Returns:
        Seconds of one call in each round, by name.
    """
    start = time.monotonic()
    names = list(calls)
    repeated = dict.fromkeys(names, 1)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-1, repeats):
        if turn > 0 and time.monotonic() - start > seconds:
            break
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            taken = _timed(calls[name], repeated[name], device)
            if turn >= 0:
                times[name].append(taken)
            elif device.type != "cpu":
                taken = _timed(calls[name], 1, device)
                repeated[name] = max(1, min(20, round(0.1 / taken)))
    return times


def _timed(call: Callable[[], Any], repeated: int, device: torch.device) -> float:
    _synchronise(device)
    start = time.perf_counter()
    for _ in range(repeated):
        call()
    _synchronise(device)
    return (time.perf_counter() - start) / repeated


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def ratios(base: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """Return median, least and greatest of `base / other` over the rounds."""
    each = [before / after for before, after in zip(base, other, strict=True)]
    return {"median": statistics.median(each), "min": min(each), "max": max(each)}


def fit_exponent(tokens: Sequence[int], seconds: Sequence[float]) -> float | None:
    """Return the slope of time over tokens in double logarithm; None for fewer than two sizes."""
    if len(tokens) < 2:
        return None
    return statistics.linear_regression([math.log(n) for n in tokens], [math.log(t) for t in seconds]).slope


def peak_memory(call: Callable[[], Any], device: torch.device) -> int | None:
    """Return the bytes that a call needs beyond what is allocated before it; None where that is not known.

    On CUDA what PyTorch allocated; on Linux what the process had resident, which is only right in a fresh process.
    """
    gc.collect()
    if device.type == "cuda":
        _synchronise(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        _synchronise(device)
        return torch.cuda.max_memory_allocated(device) - before
    resident = _resident("VmRSS")
    call()
    highest = _resident("VmHWM")
    return None if resident is None or highest is None else max(0, highest - resident)


def _resident(field: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)


def _peak_of_unet(name: str, variant: Variant, size: int, batch: int, device: str, dtype: torch.dtype) -> int | None:
    """Build a model, and return the peak memory of its first call."""
    model = make_model(name, torch.device(device), dtype)
    return peak_memory(_unet_call(variant.install(model.unet), model.inputs(size, batch)), torch.device(device))


def _in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _without_gradients(calls: Mapping[str, Callable[[], Any]]) -> dict[str, Callable[[], Any]]:
    return {name: torch.inference_mode()(call) for name, call in calls.items()}


def _graphed_call(unet: Any, inputs: dict[str, Any]) -> Callable[[], Any]:
    """Capture a UNet call in a CUDA graph; what its hooks prepare on the host, the warm-up prepares once."""
    if hasattr(unet, "_tome_info"):
        unet._tome_info["args"]["use_rand"] = False  # tomesd's own generator cannot be captured
    call = _unet_call(unet, inputs)
    call()
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        unet.forward(**inputs)
    return graph.replay


def _unet_call(unet: nn.Module, inputs: dict[str, Any]) -> Callable[[], Any]:
    def call() -> Any:
        with torch.inference_mode():
            return unet(inputs["sample"], **{name: value for name, value in inputs.items() if name != "sample"}).sample

    return call


# Methods -------------------------------------------------------------------------------------------------------------


def single_phases(config: PatchConfig, steps: int = _STEPS) -> list[tuple[PatchConfig, int]]:
    """Cut a method in configurations of one phase each.

    Returns:
        Each with its number of steps in a run of `steps`; exact phases have no phases.
    """
    counts: dict[Phase, int] = {}
    for step in range(steps):
        phase = config.phase_at(step, steps)
        if phase.attention == "softmax":  # what it does not use makes no difference
            phase = Phase(1.0, ratio=phase.ratio, stride=phase.stride) if phase.ratio else EXACT
        phase = dataclasses.replace(phase, until=1.0)
        counts[phase] = counts.get(phase, 0) + 1
    return [
        (dataclasses.replace(config, phases=() if phase.exact else (phase,)), count) for phase, count in counts.items()
    ]


def resolve_methods(methods: Iterable[str | PatchConfig] | None, **settings: Any) -> list[PatchConfig]:
    """Return configurations for the names of presets; all of them where none is named.

    Raises:
        ElfattError: a method that is not known.
    """
    chosen = METHODS if methods is None else methods
    return [
        method if isinstance(method, PatchConfig) else PatchConfig.preset(method, **settings)
        for method in chosen
        if method != "sd"
    ]


def _parts(configs: Sequence[PatchConfig]) -> tuple[dict[str, Variant], dict[str, list[tuple[str, int]]]]:
    """Work out which UNet calls to time, and of how many of which each method's run is made.

    Returns:
        Variants by name; for each method the names and step counts of its parts.
    """
    variants: dict[str, Variant] = {"untouched": UNTOUCHED}
    runs: dict[str, list[tuple[str, int]]] = {"untouched": [("untouched", _STEPS)]}

    def add(row: str, name: str, variant: Variant) -> None:
        same = next((known for known, other in variants.items() if _same_work(other, variant)), name)
        variants.setdefault(same, variant)
        runs[row] = [(same, _STEPS)]

    for config in configs:
        merging = [phase.ratio for phase in config.phases if phase.ratio > 0 and phase.attention == "softmax"]
        if config.method == "tome" and merging:
            add("tomesd", "tomesd", Variant("tomesd", config))
        run = []
        for index, (part, count) in enumerate(single_phases(config)):
            variant = Variant("patch", part) if part.phases else UNTOUCHED
            known = [name for name, other in variants.items() if _same_work(other, variant)]
            name = known[0] if known else f"{config.method}/{index}"
            variants.setdefault(name, variant)
            run.append((name, count))
        runs[config.method] = run
        layers = "" if config.levels == 1 and config.max_downsample is None else _layers_label(config)
        add(f"floor{layers}", f"floor{layers}", Variant("floor", _layers_of(config)))
    return variants, runs


def _same_work(one: Variant, other: Variant) -> bool:
    strip = functools.partial(dataclasses.replace, method="same")
    return one.kind == other.kind and strip(one.config) == strip(other.config)


def _layers_of(config: PatchConfig) -> PatchConfig:
    return PatchConfig(levels=config.levels, max_downsample=config.max_downsample)


def _layers_label(config: PatchConfig) -> str:
    return f" of {config.levels} levels" if config.max_downsample is None else f" to 1/{config.max_downsample}"


# The benchmarks ------------------------------------------------------------------------------------------------------


def unet(
    model: str | Model = "sd15",
    *,
    sizes: Sequence[int] = (512, 1024),
    methods: Iterable[str | PatchConfig] | None = None,
    batch: int = 2,
    repeats: int = 5,
    device: str = "auto",
    dtype: str = "auto",
    compile: bool = False,
    graphs: bool = False,
    memory: bool = True,
    seconds: float = math.inf,
    **settings: Any,
) -> Results:
    """Time one UNet call in every phase of every method, and add them up over a run of 50 steps.

    Args:
        model: `sd15`, `sdxl` (random weights), `toy`, a path or a hub id; or a model.
        sizes: of the pictures in pixels.
        methods: presets or configurations; all presets by default. `tome` brings the package tomesd with it.
        batch: of the UNet: pictures, times two with guidance.
        repeats: rounds that count.
        device: as for `load_pipeline`.
        dtype: likewise.
        compile: run every variant through `torch.compile`.
        graphs: replay CUDA graphs, so that the time to launch kernels does not hide what the device needs.
        memory: measure the peak memory, on a CPU in a fresh process for each variant.
        seconds: for each size, start no further round past this time.
        **settings: for the presets, such as `ratio=0.5`.

    Returns:
        Machine, settings, and rows: for each size and method the seconds of a call (the mean over the run's steps), its
        parts, the gain over untouched and the share of the floor.
    """
    place = pick_device(device)
    precision = pick_dtype(dtype, place)
    if graphs and place.type != "cuda":
        raise ElfattError(f"graphs=True is not accepted on {place.type}; CUDA graphs need a CUDA device.")
    configs = resolve_methods(methods, **settings)
    made = model if isinstance(model, Model) else make_model(model, place, precision)
    variants, runs = _parts(configs)
    units = {name: variant.install(copy_structure(made.unet)) for name, variant in variants.items()}
    if compile:
        units = _compiled(units)
    rows = []
    for size in sizes:
        inputs = made.inputs(size, batch)
        make_call = _graphed_call if graphs else _unet_call
        calls = {name: make_call(unit, inputs) for name, unit in units.items()}
        times = interleave(calls, repeats, place, seconds=seconds)
        peaks: dict[str, int | None] = {}
        if memory and place.type == "cuda":
            peaks = {name: peak_memory(call, place) for name, call in calls.items()}
        elif memory and isinstance(model, str) and not compile:
            measure = functools.partial(_in_fresh_process, _peak_of_unet, model)
            peaks = {name: measure(variant, size, batch, str(place), precision) for name, variant in variants.items()}
        rows += [{"size": size, "batch": batch, **row} for row in _method_rows(runs, times, peaks)]
    asked = {"model": model if isinstance(model, str) else "given", "compile": compile, "graphs": graphs}
    described = {name: _described(variant) for name, variant in variants.items()}
    return _results("unet", rows, place, precision, repeats=repeats, variants=described, **asked)


def _method_rows(
    runs: Mapping[str, list[tuple[str, int]]], times: Mapping[str, list[float]], peaks: Mapping[str, int | None]
) -> list[dict[str, Any]]:
    """Add the parts of every method up, round by round."""
    turns = range(len(times["untouched"]))
    totals = {
        method: [sum(times[name][turn] * count for name, count in run) / _STEPS for turn in turns]
        for method, run in runs.items()
    }
    floors = [method for method in runs if method.startswith("floor")]
    rows = []
    for method, run in runs.items():
        known = [peak for name, _ in run if (peak := peaks.get(name)) is not None]
        rows.append(
            {
                "method": method,
                "seconds": statistics.median(totals[method]),
                "rounds": totals[method],
                "gain": ratios(totals["untouched"], totals[method]),
                "over_floor": {floor: ratios(totals[method], totals[floor]) for floor in floors},
                "peak_bytes": max(known) if known else None,
                "parts": [
                    {"variant": name, "steps": count, "seconds": statistics.median(times[name])}
                    | {"gain": ratios(times["untouched"], times[name])}
                    | {"over_floor": {floor: ratios(times[name], totals[floor]) for floor in floors}}
                    for name, count in run
                ],
            }
        )
    return rows


def _compiled(units: Mapping[str, Any]) -> dict[str, Any]:
    """Compile every copy; they share the code of their class, so each is one more entry in its cache."""
    import torch._dynamo

    config: Any = torch._dynamo.config
    limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # before PyTorch 2.6
    setattr(config, limit, max(getattr(config, limit), 16 * len(units)))
    return {name: torch.compile(unit) for name, unit in units.items()}


def pipeline(
    model: str = "toy",
    *,
    sizes: Sequence[int] = (),
    methods: Iterable[str | PatchConfig] | None = None,
    batch: int = 1,
    repeats: int = 5,
    steps: int = 25,
    device: str = "auto",
    dtype: str = "auto",
    **settings: Any,
) -> Results:
    """Time a whole pipeline with guidance, from text (or its embedding, with random weights) to pictures.

    Args:
        model: as for `unet`.
        sizes: of the pictures in pixels; the model's own by default.
        methods: as for `unet`.
        batch: pictures in a run.
        repeats: rounds that count.
        steps: denoising steps.
        device: as for `load_pipeline`.
        dtype: likewise.
        **settings: for the presets.

    Returns:
        As `unet`; the seconds are those of a run.
    """
    place = pick_device(device)
    precision = pick_dtype(dtype, place)
    configs = resolve_methods(methods, **settings)
    pipe, inputs = _make_pipeline(model, place, precision, batch)
    pipe.set_progress_bar_config(disable=True)
    own = int(pipe.unet.config.sample_size * pipe.vae_scale_factor)
    variants = {"untouched": UNTOUCHED}
    for config in configs:
        if config.method == "tome":
            variants["tomesd"] = Variant("tomesd", config)
        if config.phases:
            variants[config.method] = Variant("patch", config)
        variants.setdefault("floor", Variant("floor", _layers_of(config)))
    rows = []
    for size in sizes or (own,):
        calls = {
            name: functools.partial(_run_pipeline, pipe, variant, inputs, size, steps)
            for name, variant in variants.items()
        }
        times = interleave(calls, repeats, place)
        runs = {name: [(name, _STEPS)] for name in variants}
        rows += [{"size": size, "batch": batch, **row} for row in _method_rows(runs, times, {})]
    described = {name: _described(variant) for name, variant in variants.items()}
    return _results("pipeline", rows, place, precision, model=model, repeats=repeats, steps=steps, variants=described)


def _run_pipeline(pipe: Any, variant: Variant, inputs: dict[str, Any], size: int, steps: int) -> None:
    """Run a pipeline once, with a variant on a copy of its UNet's structure."""
    from elfatt_sd.patch import apply_patch, remove_patch

    before = pipe.unet
    pipe.unet = copy_structure(before)
    try:
        if variant.kind == "patch":
            apply_patch(pipe, variant.config)  # the pipeline, so that the patch finds its scheduler
        else:
            variant.install(pipe.unet)
        generator = torch.Generator().manual_seed(0)
        pipe(**inputs, height=size, width=size, num_inference_steps=steps, generator=generator, output_type="pt")
    finally:
        remove_patch(pipe)
        pipe.unet = before


def _make_pipeline(name: str, device: torch.device, dtype: torch.dtype, batch: int) -> tuple[Any, dict[str, Any]]:
    """Return a pipeline and its inputs; one with random weights is given embeddings."""
    if name not in _SHAPES:
        return load_pipeline(name, device=str(device), dtype=dtype), {"prompt": ["a red circle"] * batch}
    import diffusers

    library: Any = diffusers
    with torch.device("meta"):
        vae = library.AutoencoderKL(**_VAE)
    model = make_model(name, device, dtype)
    parts = {
        "unet": model.unet,
        "vae": _fill(vae, device, dtype).eval(),
        "scheduler": library.DDIMScheduler(steps_offset=1, clip_sample=False),
        "text_encoder": None,
        "tokenizer": None,
    }
    example = model.inputs(8 * model.scale, batch)
    text = example["encoder_hidden_states"]
    inputs = {"prompt_embeds": text, "negative_prompt_embeds": torch.zeros_like(text)}
    if name == "sd15":
        unused = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
        return library.StableDiffusionPipeline(**parts, **unused), inputs
    pooled = example["added_cond_kwargs"]["text_embeds"]
    inputs |= {"pooled_prompt_embeds": pooled, "negative_pooled_prompt_embeds": torch.zeros_like(pooled)}
    return library.StableDiffusionXLPipeline(**parts, text_encoder_2=None, tokenizer_2=None), inputs


def layer(
    *,
    tokens: Sequence[int] = (4096, 16384),
    batch: int = 2,
    repeats: int = 5,
    device: str = "auto",
    dtype: str = "auto",
    block_size: int = 128,
    max_seconds: float = math.inf,
) -> Results:
    """Time one self-attention layer of SD 1.5's finest level: the attention itself, and the layer with projections.

    Args:
        tokens: of the (square) grid.
        batch: of the layer.
        repeats: rounds that count.
        device: as for `load_pipeline`.
        dtype: likewise.
        block_size: tokens in a block.
        max_seconds: leave a variant out at a size where its growth so far lets expect a call longer than this.

    Returns:
        Machine, settings, and rows for each size and variant: `part` is `attention` or `layer`.
    """
    place = pick_device(device)
    precision = pick_dtype(dtype, place)
    rows: list[dict[str, Any]] = []
    for count in sorted(tokens):
        side = math.isqrt(count)
        if side * side != count:
            raise ElfattError(f"tokens={count} is not accepted; give the number of tokens of a square grid.")
        groups = {
            "attention": _attention_calls(count, batch, block_size, place, precision),
            "layer": _layer_calls(side, batch, block_size, place, precision),
        }
        for part, calls in groups.items():
            before = [row for row in rows if row["part"] == part]
            kept = {name: call for name, call in calls.items() if _expected(before, name, count) <= max_seconds}
            times = interleave(kept, repeats, place) if kept else {}
            for name, taken in times.items():
                gain = ratios(times["softmax"], taken) if "softmax" in times else None
                rows.append({"tokens": count, "batch": batch, "part": part, "method": name, "gain": gain})
                rows[-1] |= {"seconds": statistics.median(taken), "rounds": taken}
    return _results("layer", rows, place, precision, repeats=repeats, block_size=block_size)


def growth(*, tokens: Sequence[int] = (4096, 9216, 16384, 36864, 65536), **options: Any) -> Results:
    """Time a layer over sizes and fit the exponent of its growth with the tokens.

    Args:
        tokens: sizes of square grids.
        **options: of `layer`.

    Returns:
        As `layer`, and `exponents` by part and variant.
    """
    results = layer(tokens=tokens, **options)
    exponents: dict[str, dict[str, float | None]] = {}
    for part, name in dict.fromkeys((row["part"], row["method"]) for row in results["rows"]):
        own = [row for row in results["rows"] if (row["part"], row["method"]) == (part, name)]
        fitted = fit_exponent([row["tokens"] for row in own], [row["seconds"] for row in own])
        exponents.setdefault(part, {})[name] = fitted
    return {**results, "kind": "growth", "exponents": exponents}


def _expected(rows: Sequence[dict[str, Any]], name: str, tokens: int) -> float:
    """Expect a call's time from the last size, as if its cost were quadratic."""
    own = [row for row in rows if row["method"] == name]
    return own[-1]["seconds"] * (tokens / own[-1]["tokens"]) ** 2 if own else (math.inf if rows else 0.0)


def _attention_calls(
    tokens: int, batch: int, block_size: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Callable[[], Any]]:
    from elfatt_sd.attention import agent_attention, block_attention, elfatt_attention, pool_agents, softmax_attention

    generator = torch.Generator().manual_seed(0)
    shape = (3, batch, tokens, _LAYER_HEADS, _LAYER_CHANNELS // _LAYER_HEADS)
    q, k, v = torch.randn(shape, generator=generator).to(device, dtype)
    calls = {
        "softmax": lambda: softmax_attention(q, k, v),
        "agent": lambda: agent_attention(q, k, v, pool_agents(q, 64)),
        "block": lambda: block_attention(q, k, v, block_size),
        "elfatt": lambda: elfatt_attention(q, k, v, agents=64, block_size=block_size),
    }
    return _without_gradients(calls)


def _layer_calls(
    side: int, batch: int, block_size: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Callable[[], Any]]:
    configs = {
        f"block, {order}": Phase(1.0, "block", block_size=block_size, block_order=order)
        for order in BLOCK_ORDERS
        if order != "sequence"
    }
    configs["agent"] = Phase(1.0, "agent")
    configs["elfatt"] = Phase(1.0, "elfatt", block_size=block_size)
    configs["elfatt on tome 0.5"] = Phase(1.0, "elfatt", ratio=0.5, block_size=block_size)
    configs["tome 0.5"] = Phase(1.0, "softmax", ratio=0.5)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, side * side, _LAYER_CHANNELS, generator=generator).to(device, dtype)
    attention = _attention_module(device, dtype)
    calls: dict[str, Callable[[], Any]] = {"softmax": functools.partial(attention, x)}
    calls["tomesd 0.5"] = functools.partial(_with_tomesd, attention, x, side, 0.5)
    for name, phase in configs.items():
        calls[name] = functools.partial(_patched_layer(attention, PatchConfig(phases=(phase,)), side, device), x)
    return _without_gradients(calls)


def _attention_module(device: torch.device, dtype: torch.dtype) -> Any:
    from diffusers.models.attention_processor import Attention

    size = _LAYER_CHANNELS // _LAYER_HEADS
    with torch.device("meta"):
        attention = Attention(_LAYER_CHANNELS, heads=_LAYER_HEADS, dim_head=size)
    return _fill(attention, device, dtype).eval()


def _patched_layer(attention: Any, config: PatchConfig, side: int, device: torch.device) -> Any:
    """Return a copy of an attention module, patched as `apply_patch` does it, with its step begun."""
    from elfatt_sd.processor import STATE, Denoiser, ElfattProcessor, LayerState
    from elfatt_sd.schedule import Position

    attention = copy_structure(attention)
    denoiser = Denoiser(config)
    state = LayerState(SelfAttention("layer", attention, None, 1), 0, attention.processor, denoiser)
    denoiser.layers = [state]
    setattr(attention, STATE, state)
    attention.set_processor(ElfattProcessor())
    denoiser.begin(Position(0, 1), 0, torch.empty(1, 1, side, side, device=device))
    return attention


def _with_tomesd(attention: Any, x: Tensor, side: int, ratio: float) -> Tensor:
    from tomesd.merge import bipartite_soft_matching_random2d

    merge, unmerge = bipartite_soft_matching_random2d(x, side, side, 2, 2, int(x.shape[1] * ratio), no_rand=True)
    result: Tensor = unmerge(attention(merge(x)))
    return result


def merging(
    *,
    tokens: Sequence[int] = (4096, 16384),
    ratio: float = 0.5,
    stride: int = 2,
    channels: int = _LAYER_CHANNELS,
    batch: int = 2,
    repeats: int = 5,
    device: str = "auto",
    dtypes: Sequence[str] = ("float32", "bfloat16"),
) -> Results:
    """Time matching, merge and unmerge beside tomesd's.

    Args:
        tokens: of the (square) grid.
        ratio: share of the tokens merged away.
        stride: side of a cell.
        channels: of the tokens.
        batch: of the tokens.
        repeats: rounds that count.
        device: as for `load_pipeline`.
        dtypes: precisions to time.

    Returns:
        Machine, settings and rows: the gain is tomesd's time over ours.
    """
    from tomesd.merge import bipartite_soft_matching_random2d

    from elfatt_sd.merging import match_tokens

    place = pick_device(device)
    rows = []
    for dtype in dtypes:
        for count in tokens:
            side = math.isqrt(count)
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(batch, side * side, channels, generator=generator).to(place, pick_dtype(dtype, place))

            def peer(x: Tensor = x, side: int = side) -> None:
                removed = int(x.shape[1] * ratio)
                merge, unmerge = bipartite_soft_matching_random2d(x, side, side, stride, stride, removed, no_rand=True)
                unmerge(merge(x))

            def ours(x: Tensor = x, side: int = side, ordered: bool = True) -> None:
                matching = match_tokens(x, side, side, ratio, stride, ordered=ordered)
                if matching is not None:
                    matching.unmerge(matching.merge(x))

            calls: dict[str, Callable[[], Any]] = {
                "tomesd": peer,
                "ours": ours,
                "ours, unordered": functools.partial(ours, ordered=False),
            }
            times = interleave(_without_gradients(calls), repeats, place)
            for name, taken in times.items():
                rows.append({"tokens": side * side, "batch": batch, "dtype": dtype, "method": name})
                rows[-1] |= {"seconds": statistics.median(taken), "rounds": taken}
                rows[-1] |= {"gain": ratios(times["tomesd"], taken)}
    return _results("merging", rows, place, None, ratio=ratio, stride=stride, channels=channels, repeats=repeats)


# Results -------------------------------------------------------------------------------------------------------------


def _results(
    kind: str, rows: list[dict[str, Any]], device: torch.device, dtype: torch.dtype | None, **settings: Any
) -> Results:
    from elfatt_sd.evaluation.environment import describe_environment

    precision = {} if dtype is None else {"dtype": str(dtype).removeprefix("torch.")}
    return {"kind": kind, "settings": {**precision, **settings}, "machine": describe_environment(device), "rows": rows}


def _described(variant: Variant) -> dict[str, Any]:
    return {"kind": variant.kind, "config": variant.config.to_dict()}


def markdown(results: Results) -> str:
    """Return the rows as a Markdown table."""
    keys = [key for key in ("size", "tokens", "batch", "dtype", "part") if key in results["rows"][0]]
    head = [*keys, "method", "ms", "gain", "least to greatest"]
    floors = list(results["rows"][0].get("over_floor", ()))
    memory = any(row.get("peak_bytes") is not None for row in results["rows"])
    head += [f"over {floor}" for floor in floors] + (["peak MiB"] if memory else [])
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in results["rows"]:
        parts = row.get("parts", ())
        named = [{**part, "method": f"&nbsp; {part['steps']} steps {part['variant']}"} for part in parts]
        named = named if len(parts) > 1 else []
        for each in [row, *({**row, "peak_bytes": None, **part} for part in named)]:
            gain = each.get("gain")
            cells = [str(each[key]) for key in keys] + [each["method"], f"{each['seconds'] * 1e3:.4g}"]
            cells += [f"{gain['median']:.2f}", f"{gain['min']:.2f} to {gain['max']:.2f}"] if gain else ["", ""]
            cells += [f"{each['over_floor'][floor]['median']:.3f}" for floor in floors]
            if memory:
                cells.append("" if each["peak_bytes"] is None else f"{each['peak_bytes'] / 2**20:.0f}")
            lines.append(f"| {' | '.join(cells)} |")
    for part, fitted in results.get("exponents", {}).items():
        lines += ["", f"Time of the {part} grows with tokens to the power of: "]
        lines[-1] += ", ".join(f"{name} {value:.2f}" for name, value in fitted.items() if value is not None) + "."
    return "\n".join(lines) + "\n"


def save(results: Results, out: str | Path) -> list[Path]:
    """Write results as JSON, a Markdown table and a plot.

    Args:
        results: of one of the benchmarks.
        out: folder; it is made where it is not there.

    Returns:
        The paths of the three files.
    """
    from elfatt_sd.files import atomic_file, write_json

    paths = [Path(out) / f"{results['kind']}.{kind}" for kind in ("json", "md", "png")]
    write_json(paths[0], results)
    with atomic_file(paths[1]) as file:
        file.write(markdown(results).encode())
    with atomic_file(paths[2]) as file:
        _plot(results).savefig(file, format="png", dpi=150)
    return paths


def _plot(results: Results) -> Any:
    """Draw time over tokens for sizes of a layer, else bars of the gain with its spread."""
    from matplotlib.figure import Figure

    rows = results["rows"]
    if results["kind"] in ("layer", "growth"):
        parts = list(dict.fromkeys(row["part"] for row in rows))
        figure = Figure(figsize=(5.5 * len(parts), 4), layout="constrained")
        for axes, part in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
            _draw_growth(axes, [row for row in rows if row["part"] == part], part)
        return figure
    panels: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        title = f"{row['size']} pixels" if "size" in row else f"{row['tokens']} tokens, {row['dtype']}"
        panels.setdefault(f"{title}, batch {row['batch']}", []).append(row)
    height = 0.9 + 0.3 * max(len(panel) for panel in panels.values())
    figure = Figure(figsize=(4.5 * len(panels), height), layout="constrained")
    for axes, (title, panel) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        _draw_gains(axes, panel, title, "tomesd" if results["kind"] == "merging" else "untouched")
    return figure


def _draw_growth(axes: Any, rows: Sequence[dict[str, Any]], part: str) -> None:
    from matplotlib import colormaps

    for index, name in enumerate(dict.fromkeys(row["method"] for row in rows)):
        own = [row for row in rows if row["method"] == name]
        style = {
            "color": colormaps["tab20"](2 * index % 20 + index // 10),
            "marker": "osv^Dx"[index % 6],
            "markersize": 4,
        }
        axes.plot([row["tokens"] for row in own], [row["seconds"] * 1e3 for row in own], label=name, **style)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="milliseconds", title=part)
    sizes = sorted({row["tokens"] for row in rows})
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def _draw_gains(axes: Any, rows: Sequence[dict[str, Any]], title: str, base: str) -> None:
    gains = [row["gain"] for row in rows]
    middle = [gain["median"] for gain in gains]
    spread = [[gain["median"] - gain["min"] for gain in gains], [gain["max"] - gain["median"] for gain in gains]]
    names = [row["method"] for row in rows]
    colours = ["0.75" if name == base or name.startswith("floor") else "tab:blue" for name in names]
    axes.barh(names, middle, xerr=spread, color=colours, error_kw={"linewidth": 1})
    for place, (value, gain) in enumerate(zip(middle, gains, strict=True)):
        axes.annotate(f"{value:.2f}", (gain["max"], place), xytext=(4, 0), textcoords="offset points", va="center")
    axes.axvline(1, color="0.4", linewidth=0.8, zorder=0)
    axes.set(title=title, xlabel=f"times as fast as {base}", xlim=(0, 1.18 * max(gain["max"] for gain in gains)))
    axes.invert_yaxis()
