"""The error of attentions by layer and step, on a pipeline's own activations; of a UNet also of every block order.

python -m benchmarks.orders --out benchmarks/results
python -m benchmarks.orders --model path/of/wan --frames 33 --every-step --dtype bfloat16 --prompt "an owl"
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from benchmarks import common
from benchmarks.errors import DRAWS, Row, measure_errors
from elfatt_sd.attention.ordering import BlockOrder
from elfatt_sd.benchmarking import AGENTS, ORDERS
from elfatt_sd.benchmarking.report import Results, Session
from elfatt_sd.benchmarking.variants import Size, height_and_width, is_peer, named, read_size
from elfatt_sd.config import PatchConfig
from elfatt_sd.drawing.studio import check_steps, own_settings, rows_of, warn_if_too_large
from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.generate import weights_sha256
from elfatt_sd.families import family_of, main_denoiser, step_denoisers
from elfatt_sd.loading import load_pipeline, pick_device, pick_dtype
from elfatt_sd.methods import AttentionName
from elfatt_sd.phases import Phase
from elfatt_sd.runtime.layer import fits, fitted
from elfatt_sd.toy import PROMPT
from elfatt_sd.tuning.runs import DrawSettings

PROMPTS = (PROMPT, "a green circle on a plain yellow background")
BLOCK_SIZES = (32, 128, 512)
_SOME = (2, 6, 12, 18, 23)  # of 25 calls: where methods are compared if nobody says where


def orders(
    model: str = "toy",
    *,
    methods: Iterable[str | PatchConfig] | None = None,
    prompts: Sequence[str] = PROMPTS,
    steps: int | None = None,
    record_at: Sequence[int] | None = None,
    every_step: bool = False,
    size: Size | None = None,
    frames: int | None = None,
    guidance: float | None = None,
    seed: int = 0,
    draws: int = DRAWS,
    device: str = "auto",
    dtype: str = "float32",
    session: Session | None = None,
) -> Results:
    """Measure the relative error of approximations against exact attention, by layer and step.

    Args:
        model: as `load_pipeline` takes it.
        methods: as for `unet`; by default `order_configs()`, and for transformers `joint_configs()`.
        prompts: one image each, all in one batch.
        steps: denoising steps; the model's own, by default, as `size`, `frames` and `guidance`.
        record_at: indices of the denoiser's calls to compare in; five of the run, by default.
        every_step: compare in every call.
        size: of the images in pixels.
        frames: of each clip, of models that make videos.
        guidance: scale.
        seed: of the first image.
        draws: how often what is random is drawn.
        device: as for `load_pipeline`.
        dtype: likewise.
        session: where the results go.

    Returns:
        Machine, settings and rows; see `measure_errors`.

    Raises:
        ElfattError: a method that does not go with the model, a size that it cannot draw or that does not fit into
            memory, or a call that the run does not have.
    """
    place = pick_device(device)
    precision = str(pick_dtype(dtype, place)).removeprefix("torch.")
    pipe = load_pipeline(model, device=str(place), dtype=precision)
    pipe.set_progress_bar_config(disable=True)
    configs = _methods(pipe, methods)
    own_steps, own_guidance = own_settings(pipe, model)
    steps, guidance = steps or own_steps, own_guidance if guidance is None else guidance
    check_steps(pipe, steps)
    height, width = (None, None) if size is None else height_and_width(size)
    settings = DrawSettings(steps, guidance, height, width, frames)
    settings.check(pipe)
    rows = len(prompts) * rows_of(pipe, guidance)
    warn_if_too_large(pipe, height, width, rows=rows, frames=frames)
    calls = None if every_step else sorted(record_at or {call * steps // 25 for call in _SOME})
    asked: dict[str, Any] = {"model": model, "prompts": list(prompts), "steps": steps, "record_at": calls}
    asked |= {"guidance": guidance, "seed": seed, "draws": draws, "dtype": precision, "size": size, "frames": frames}
    asked["methods"] = {name: config.to_dict() for name, config in configs.items()}
    record = (session or Session()).begin("orders", place, {**asked, "weights": weights_sha256(pipe)}, bases=[])
    given = {"num_inference_steps": steps, "output_type": "latent", **settings.arguments(pipe)}
    generators = [torch.Generator().manual_seed(seed + index) for index in range(len(prompts))]
    found: list[Row] = []

    def keep(step: int, own: list[Row]) -> None:
        found.extend(own)
        record.results["groups"] = [
            {"key": {"method": name}, "times": {}, "measured": [row for row in found if row["method"] == name]}
            for name in configs
        ]
        record.work_out()
        done, total = len({row["step"] for row in found}), steps if calls is None else len(calls)
        record.progress(f"step {step}", done, max(done, total))  # some schedulers have more calls than steps

    run = functools.partial(pipe, list(prompts), generator=generators, **given)
    measure_errors(pipe, configs, run, keep, wanted=lambda _, step: calls is None or step in calls, draws=draws)
    if missing := [call for call in calls or () if not any(row["step"] == call for row in found)]:
        count = len(pipe.scheduler.timesteps)
        raise ElfattError(f"record_at={missing[0]} is not accepted; the run has the denoiser's calls 0 to {count - 1}.")
    return record.results


def _methods(pipe: Any, methods: Iterable[str | PatchConfig] | None) -> dict[str, PatchConfig]:
    """Return what to compare, by name, as it is on the family of a pipeline."""
    denoisers = step_denoisers(pipe)
    if methods is None:
        known = joint_configs() if family_of(main_denoiser(pipe)).joint else order_configs()
        return {name: config for name, config in known.items() if fits(config, denoisers)}
    found = [method if isinstance(method, PatchConfig) else named(method) for method in methods]
    for config in found:
        if is_peer(config.method):
            raise ElfattError(f"method={config.method!r} is not accepted here; give methods that replace attention.")
    return {config.method: fitted(config, denoisers) for config in found}


def blocks(attention: AttentionName, size: int, order: BlockOrder) -> Phase:
    return Phase(1.0, attention, block_size=size, block_order=order)


def order_configs() -> dict[str, PatchConfig]:
    """Return the methods whose errors are compared, by name, each in all steps."""
    phases = {f"block {size}, {order}": blocks("block", size, order) for order in ORDERS for size in BLOCK_SIZES}
    seconds: tuple[BlockOrder, ...] = ("windows", "strided", "spread")
    for second in seconds:
        phases[f"block 128, spread and {second}"] = Phase(1.0, "block", block_order="spread", second_order=second)
    phases |= {f"cell_spread {size}": blocks("cell_spread", size, "spread") for size in BLOCK_SIZES}
    phases |= {f"sampled {size}": blocks("sampled", size, "raster") for size in BLOCK_SIZES}
    for agents in (64, 256):
        phases[f"agent {agents}"] = Phase(1.0, "agent", agents=agents)
    sd = {"agent_source": "merged", "agent_scale": 0.3, "value_shortcut": 0.075}
    phases["agent, merged queries (Agent-SD)"] = Phase(1.0, "agent", stride=4, **sd)  # type: ignore[arg-type]
    phases["elfatt 128, raster"] = Phase(1.0, "elfatt", block_order="raster")
    phases["elfatt 128, spread"] = Phase(1.0, "elfatt", block_order="spread")
    phases["elfatt 128 on tome 0.5"] = Phase(1.0, "elfatt", ratio=0.5)
    merged: tuple[BlockOrder, ...] = ("windows", "curve", "spread")
    for order in merged:
        phases[f"elfatt 128 on tome 0.5, {order}"] = Phase(1.0, "elfatt", ratio=0.5, block_order=order)
    phases["tome 0.5"] = Phase(1.0, "softmax", ratio=0.5)
    return {name: PatchConfig(name, (phase,)) for name, phase in phases.items()}


def joint_configs() -> dict[str, PatchConfig]:
    """Return the methods whose errors are compared on transformers, by name, each in all steps."""
    phases = {
        "own cell of 256, 1024 keys": Phase(1.0, "cell_spread", cell=256, block_size=1024),
        "1280 keys, no own cell": Phase(1.0, "sampled", keys=1280),
        "64 agents": Phase(1.0, "agent", agents=AGENTS, block_order="windows"),
        "own cell of 64, 128 keys": Phase(1.0, "cell_spread", cell=64, block_size=128),
        "192 keys, no own cell": Phase(1.0, "sampled", keys=192),
        "64 agents and windows": Phase(1.0, "elfatt", agents=AGENTS, block_order="windows"),
    }
    return {name: PatchConfig(name, (phase,)) for name, phase in phases.items()}


if __name__ == "__main__":
    parser = common.options(__doc__, "size", "method", "device", "dtype", dtype="float32")
    parser.add_argument("--model", default="toy")
    parser.add_argument("--prompt", action="append", help="several times")
    parser.add_argument("--record-at", type=int, action="append", help="index of a call to compare in; several times")
    parser.add_argument("--every-step", action="store_true", help="compare in every step, not in five")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--frames", type=int)
    parser.add_argument("--guidance", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=DRAWS, help="how often what is random is drawn")
    chosen = parser.parse_args()
    names = ["model", "record_at", "every_step", "steps", "frames", "guidance", "seed", "draws", "device", "dtype"]
    given = {name: getattr(chosen, name) for name in names}
    given |= {"methods": common.methods(chosen.method), "prompts": chosen.prompt or PROMPTS}
    common.run(chosen, orders, **given, size=None if chosen.size is None else read_size(chosen.size[-1]))
