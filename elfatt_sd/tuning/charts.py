"""The plots of a tuning: the curve, and the map of what was chosen."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from elfatt_sd.config import PatchConfig
from elfatt_sd.evaluation.report.palette import BASE, INK, METHODS
from elfatt_sd.phases import Phase

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from elfatt_sd.tuning.tuned import Tuned

_CHOSEN, _PREDICTED, _TRIED = METHODS[1], METHODS[0], METHODS[5]
_MARKERS = {"elfatt": "o", "elfatt-fast": "s", "elfatt-quality": "^"}
_CELL = 0.46  # inches of a layer in the map


def curve(tuned: Tuned) -> Figure:
    """Draw closeness over speed: what was predicted, what was run, and the choice."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.8, 4.2), layout="constrained")
    axes = figure.add_subplot()
    if tuned.measure.name == "PSNR":
        shown = [(speed, choice.psnr) for choice, speed in _speeds(tuned) if math.isfinite(choice.psnr)]
        axes.plot(*zip(*shown, strict=True), color=_PREDICTED, alpha=0.5, label="predicted best choices")
    _draw_tried(axes, tuned)
    if tuned.proof is not None and math.isfinite(tuned.proof.point.mean):
        _draw_chosen(axes, tuned)
    if tuned.budget.closeness is not None:
        axes.axhline(tuned.budget.closeness, color=INK, linewidth=0.8, linestyle=":", label="asked for")
    if tuned.budget.speed is not None:
        axes.axvline(tuned.budget.speed, color=INK, linewidth=0.8, linestyle=":", label="asked for")
    axes.set_xlabel("times as fast as untouched (right is better)")
    better = "up" if tuned.measure.higher else "down"
    unit = f" in {tuned.measure.unit}" if tuned.measure.unit else ""
    axes.set_ylabel(f"{tuned.measure.name} to untouched{unit} ({better} is better)")
    figure.legend(loc="outside right upper")
    return figure


def _draw_tried(axes: Any, tuned: Tuned) -> None:
    """Draw what was run and not chosen; names stand in the legend, as points may lie close together."""
    proven = None if tuned.proof is None else tuned.proof.point
    shown = [point for point in tuned.points if point is not proven and math.isfinite(point.mean)]
    if own := [(point.times, point.mean) for point in shown if point.predicted is not None]:
        axes.plot(*zip(*own, strict=True), ".", color=_TRIED, label="tried choices")
    for point in shown:
        if point.predicted is None:
            axes.plot(point.times, point.mean, _MARKERS.get(point.name, "D"), color=BASE, label=point.name)


def _draw_chosen(axes: Any, tuned: Tuned) -> None:
    assert tuned.proof is not None
    point, half = tuned.proof.point, tuned.proof.interval()
    error = None if math.isinf(half) else [[half], [half]]
    span = [[point.times - min(point.speed)], [max(point.speed) - point.times]]
    axes.errorbar(
        point.times, point.mean, error, span, "*", color=_CHOSEN, markersize=12, linewidth=1, label="chosen, held-out"
    )


def _speeds(tuned: Tuned) -> Iterator[tuple[Any, float]]:
    for choice in tuned.curve:
        left = tuned.untouched_seconds - choice.saved * tuned.realised
        if left > 0:
            yield choice, tuned.untouched_seconds / left


def choices(tuned: Tuned) -> Figure:
    """Draw a map: layers by stretches of the run, what each does there, and how much of exact attention it costs."""
    from matplotlib.figure import Figure

    config = tuned.config
    layers, ends = [own.layers for own in config.per_layer], config.stretches
    figure = Figure(figsize=(6.4, 1.1 + _CELL * max(1, len(layers))), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(False)
    for row, layer in enumerate(layers):
        own = config.for_layer(layer)
        for column, end in enumerate(ends):
            phase = own.phase_until(end)
            strength = 0.0 if phase.exact else 0.25 + 0.75 * _boldness(phase)
            axes.barh(row, 1, 0.92, column, color=_PREDICTED, alpha=strength * 0.6, edgecolor="white", linewidth=1)
            axes.text(column + 0.5, row, _short(phase), ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(layers)), [_name(layer) for layer in layers], fontsize=7)
    axes.invert_yaxis()
    axes.set_xticks(
        range(len(ends) + 1), [f"{end:.0%}" for end in (0.0, *ends)]
    )  # a single step has room for text, too
    axes.set_xlim(0, len(ends))
    axes.set_xlabel("of the run")
    axes.spines[["left", "bottom"]].set_visible(False)
    return figure


def _boldness(phase: Phase) -> float:
    if phase.attention.empty or phase.dense:
        return float(phase.attention.empty)
    keys = _keys(phase)
    return max(0.0, min(1.0, 1 - math.log2(max(keys, 32) / 32) / 6)) if keys else 0.5


def _keys(phase: Phase) -> int:
    return max(int(getattr(phase.attention, name, 0)) for name in ("keys", "block_size"))


def _short(phase: Phase) -> str:
    if phase.dense:
        return phase.attention_dtype or "exact"
    text = f"{phase.attention.name.replace('_', ' ')} {_keys(phase) or ''}".strip()
    if phase.merge.ratio:
        text = f"merge {phase.merge.ratio:.0%}"
    rows = "\nwith guidance" * phase.residual_guidance
    return text + (f"\nshared by {phase.residual_steps}{rows}" if phase.residual_steps > 1 else "")


def _name(layer: str) -> str:
    return layer.replace(".transformer_blocks.", ".").replace(".attentions.", ".").removesuffix(".attn1")


def describe(config: PatchConfig) -> list[tuple[str, str]]:
    """Return what each layer does, stretch by stretch, for a table."""
    rows = []
    for own in config.per_layer:
        start, parts = 0.0, []
        for phase in own.phases:
            parts.append(f"{start:.0%} to {phase.until:.0%}: {_short(phase)}".replace("\n", ", "))
            start = phase.until
        rows.append((own.layers, "; ".join(parts)))
    return rows
