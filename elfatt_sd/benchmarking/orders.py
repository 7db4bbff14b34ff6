"""The error of every block order, block size and attention on the activations of a real pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elfatt_sd.benchmarking.record import Record, Session
from elfatt_sd.benchmarking.rows import Results
from elfatt_sd.config import PatchConfig, Phase
from elfatt_sd.evaluation.errors import DRAWS, method_errors, record_inputs
from elfatt_sd.evaluation.provenance import weights_sha256
from elfatt_sd.methods import AttentionName
from elfatt_sd.pipelines import load_pipeline, pick_device
from elfatt_sd.tiling import BLOCK_ORDERS, BlockOrder

PROMPTS = ("a red star on a striped blue background", "a green circle on a plain yellow background")
BLOCK_SIZES = (32, 128, 512)


def order_configs() -> dict[str, PatchConfig]:
    """Return the methods that are compared, by name, each in all steps."""
    phases: dict[str, Phase] = {}
    for order in BLOCK_ORDERS:
        if order != "sequence":  # without merging, that is `raster`
            phases |= {f"block {size}, {order}": _blocks("block", size, order) for size in BLOCK_SIZES}
    for order in ("windows", "strided", "spread"):
        phases[f"block 128, spread and {order}"] = Phase(1.0, "block", block_order="spread", second_order=order)
    phases |= {f"cell_spread {size}": _blocks("cell_spread", size, "spread") for size in BLOCK_SIZES}
    phases |= {f"sampled {size}": _blocks("sampled", size, "raster") for size in BLOCK_SIZES}
    sd = {"agent_source": "merged", "agent_scale": 0.3, "value_shortcut": 0.075}
    for agents in (64, 256):
        phases[f"agent {agents}"] = Phase(1.0, "agent", agents=agents)
    phases["agent, merged queries (Agent-SD)"] = Phase(1.0, "agent", stride=4, **sd)  # type: ignore[arg-type]
    phases["elfatt 128, raster"] = Phase(1.0, "elfatt", block_order="raster")
    phases["elfatt 128, spread"] = Phase(1.0, "elfatt", block_order="spread")
    phases["elfatt 128 on tome 0.5"] = Phase(1.0, "elfatt", ratio=0.5)
    for order in ("windows", "curve", "spread"):
        phases[f"elfatt 128 on tome 0.5, {order}"] = Phase(1.0, "elfatt", ratio=0.5, block_order=order)
    phases["tome 0.5"] = Phase(1.0, "softmax", ratio=0.5)
    return {name: PatchConfig(name, (phase,)) for name, phase in phases.items()}


def _blocks(attention: AttentionName, size: int, order: BlockOrder) -> Phase:
    return Phase(1.0, attention, block_size=size, block_order=order)


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
        prompts: one picture each.
        steps: denoising steps.
        record_at: indices of the UNet calls to compare in.
        guidance: scale; the model's own, or 7.5, by default.
        seed: of the first picture.
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
