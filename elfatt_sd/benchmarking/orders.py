"""The error of every block order, block size and attention on the activations of a real pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elfatt_sd.benchmarking.presets import order_configs
from elfatt_sd.benchmarking.record import Record, Session
from elfatt_sd.benchmarking.rows import Results
from elfatt_sd.config import PatchConfig
from elfatt_sd.evaluation.errors import DRAWS, method_errors, record_inputs
from elfatt_sd.evaluation.provenance import weights_sha256
from elfatt_sd.pipelines import load_pipeline, pick_device

PROMPTS = ("a red star on a striped blue background", "a green circle on a plain yellow background")


def orders(
    model: str = "toy",
    *,
    configs: Mapping[str, PatchConfig] | None = None,
    prompts: Sequence[str] = PROMPTS,
    steps: int = 25,
    record_at: Sequence[int] = (2, 6, 12, 18, 23),
    guidance: float | None = None,
    seed: int = 0,
    draws: int = DRAWS,
    device: str = "auto",
    variant: str | None = None,
    session: Session | None = None,
) -> Results:
    """Measure the relative error of block orders, agents and merging against exact attention.

    Args:
        model: as `load_pipeline` takes it.
        configs: methods by name; `order_configs()` by default.
        prompts: one image each.
        steps: denoising steps.
        record_at: indices of the UNet calls to compare in.
        guidance: scale; the model's own, or 7.5, by default.
        seed: of the first image.
        draws: how often what is random is drawn.
        device: as for `load_pipeline`.
        variant: of the weights, likewise.
        session: where the results go.

    Returns:
        Machine, settings and rows; see `method_errors`.
    """
    chosen = order_configs() if configs is None else configs
    asked: dict[str, Any] = {"model": model, "prompts": list(prompts), "steps": steps, "record_at": list(record_at)}
    asked |= {"guidance": _own_guidance(model) if guidance is None else guidance, "seed": seed, "draws": draws}
    asked["methods"] = {name: config.to_dict() for name, config in chosen.items()}
    place = pick_device(device)
    pipe = load_pipeline(model, device=str(place), dtype="float32", variant=variant)
    pipe.set_progress_bar_config(disable=True)
    record = Record(session, "orders", place, {**asked, "weights": weights_sha256(pipe)}, bases=[])
    done = {row["method"] for row in record.results["rows"]}
    missing = [name for name in chosen if name not in done]
    if missing:
        record.tell("recording", 0, len(missing))
        options = {"guidance_scale": asked["guidance"]}
        recording = record_inputs(pipe, chosen.values(), prompts, steps, record_at, seed, **options)
        for index, name in enumerate(missing):
            record.keep_errors(name, method_errors(recording, name, chosen[name], draws=draws))
            record.tell(name, index + 1, len(missing))
    return record.results


def _own_guidance(model: str) -> float:
    from elfatt_sd.toy import GUIDANCE

    return GUIDANCE if model == "toy" else 7.5
