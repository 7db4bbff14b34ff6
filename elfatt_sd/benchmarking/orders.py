"""The error of every block order, size and attention on the activations of a real pipeline."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from elfatt_sd.benchmarking.lineup import Size, height_and_width, named
from elfatt_sd.benchmarking.names import is_peer
from elfatt_sd.benchmarking.presets import joint_configs, order_configs
from elfatt_sd.benchmarking.record import Record, Session
from elfatt_sd.benchmarking.rows import Results
from elfatt_sd.budget import warn_if_too_large
from elfatt_sd.choosing import fits, fitted
from elfatt_sd.config import ElfattError, PatchConfig
from elfatt_sd.evaluation.errors import DRAWS, Row, measure_errors
from elfatt_sd.evaluation.provenance import weights_sha256
from elfatt_sd.families import family_of, main_denoiser, step_denoisers
from elfatt_sd.pipelines import load_pipeline, pick_device, pick_dtype
from elfatt_sd.running import check_steps, own_settings, rows_of
from elfatt_sd.toy import PROMPT
from elfatt_sd.tuning.runs import Settings

PROMPTS = (PROMPT, "a green circle on a plain yellow background")
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
    variant: str | None = None,
    session: Session | None = None,
) -> Results:
    """Measure the relative error of approximations against exact attention, by layer and step.

    Args:
        model: as `load_pipeline` takes it.
        methods: as for `unet`; by default `order_configs()`, and for transformers `joint_configs()`.
        prompts: one image each, all in one batch.
        steps: denoising steps; the model's own, by default.
        record_at: indices of the denoiser's calls to compare in; five of the run, by default.
        every_step: compare in every call.
        size: of the images in pixels; the model's own, by default.
        frames: of each clip, of models that make videos; the model's own, by default.
        guidance: scale; the model's own, by default.
        seed: of the first image.
        draws: how often what is random is drawn.
        device: as for `load_pipeline`.
        dtype: likewise.
        variant: of the weights, likewise.
        session: where the results go.

    Returns:
        Machine, settings and rows; see `measure_errors`.

    Raises:
        ElfattError: a method that does not go with the model, a size that it cannot draw or that does not fit into
            memory, or a call that the run does not have.
    """
    place = pick_device(device)
    precision = str(pick_dtype(dtype, place)).removeprefix("torch.")
    pipe = load_pipeline(model, device=str(place), dtype=precision, variant=variant)
    pipe.set_progress_bar_config(disable=True)
    configs = _methods(pipe, methods)
    own_steps, own_guidance = own_settings(pipe, model)
    steps, guidance = steps or own_steps, own_guidance if guidance is None else guidance
    check_steps(pipe, steps)
    height, width = (None, None) if size is None else height_and_width(size)
    settings = Settings(steps, guidance, height, width, frames)
    settings.check(pipe)
    rows = len(prompts) * rows_of(pipe, guidance)
    warn_if_too_large(pipe, height, width, rows=rows, frames=frames)
    calls = None if every_step else sorted(record_at or {call * steps // 25 for call in _SOME})
    asked: dict[str, Any] = {"model": model, "prompts": list(prompts), "steps": steps, "record_at": calls}
    asked |= {
        "guidance": guidance,
        "seed": seed,
        "draws": draws,
        "dtype": precision,
        **({"size": size} if size else {}),
        **({"frames": frames} if frames else {}),
    }
    asked["methods"] = {name: config.to_dict() for name, config in configs.items()}
    record = Record(session, "orders", place, {**asked, "weights": weights_sha256(pipe)}, bases=[])
    given = {"num_inference_steps": steps, "output_type": "latent", **settings.arguments(pipe)}
    generators = [torch.Generator().manual_seed(seed + index) for index in range(len(prompts))]
    run = functools.partial(pipe, list(prompts), generator=generators, **given)
    _compare(pipe, configs, run, record, calls, steps, draws)
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


def _compare(
    pipe: Any,
    configs: dict[str, PatchConfig],
    run: Any,
    record: Record,
    calls: list[int] | None,
    steps: int,
    draws: int,
) -> None:
    """Compare what is not known yet, and keep it step by step."""
    done = {(row["method"], row["step"]) for row in record.results["rows"]}
    left = [call for call in calls or range(steps) if not done >= {*itertools.product(configs, [call])}]
    if calls and not left:
        return
    compared = itertools.count(1)

    def keep(step: int, rows: list[Row]) -> None:
        for method in configs:
            record.keep_errors(method, [row for row in rows if row["method"] == method])
        count = next(compared)
        record.tell(f"step {step}", count, max(count, len(left)))  # some schedulers have more calls than steps

    def wanted(method: str, step: int) -> bool:
        return (calls is None or step in calls) and (method, step) not in done

    record.tell("untouched", 0, len(left))
    measure_errors(pipe, configs, run, keep, wanted=wanted, draws=draws)
    if missing := [call for call in calls or () if not any(row["step"] == call for row in record.results["rows"])]:
        count = len(pipe.scheduler.timesteps)
        raise ElfattError(f"record_at={missing[0]} is not accepted; the run has the denoiser's calls 0 to {count - 1}.")
