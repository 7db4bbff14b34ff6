"""The published figures, those of the run, and what keeps the two from being compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elfatt_sd.config import PatchConfig, known_method
from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.protocols import PRINTED
from elfatt_sd.evaluation.report.data import BASELINE, NULL, Results, Row, setting_text

FIGURES = dict(zip(PRINTED, (("FID ↓", 1), ("s/img", 3), ("GB/img", 2)), strict=True))

_TABLE = {
    "Model": "Stable Diffusion v1.5, diffusers 0.32.1",
    "Sampling": "50 steps, guidance 7.5, 512 x 512",
    "Precision": "FP16",
    "Images per row": "2000, two per ImageNet-1K class",
    "Reference": "50 000 images of the ImageNet-1K validation set",
    "Distance": "FID, published without an interval",
    "Hardware": "1 NVIDIA Tesla A100 (40 GB), FlashAttention-2",
    "Time": "batch of 48",
    "Memory": "growth of GPU memory per +1 batch",
}
_PRECISIONS = {"float16": "FP16", "bfloat16": "BF16", "float32": "FP32"}
_TOME = {
    "Model": "Stable Diffusion v1.5",
    "Sampling": "50 PLMS steps, guidance 7.5, 512 x 512",
    "Precision": "FP16",
    "Images per row": "2000, two per ImageNet-1K class",
    "Reference": "5000 images of the ImageNet-1K validation set, resized and cropped to 512 x 512",
    "Distance": "FID, published without an interval",
    "Hardware": "1 NVIDIA RTX 4090",
    "Memory": "peak divided by the batch size",
}
SETUPS = {
    "Token Merging for Fast Stable Diffusion": _TOME,
    "tabSD": _TABLE,
    "tabSDa1": _TABLE,
    "tabSDa2": {**_TABLE, "Precision": "BF16"},
}
_ASKED = {"scheduler": "PLMS", "steps": 50, "guidance": 7.5, "width": 512, "height": 512, "dtype": "float16"}
ASKED = {  # of a run's protocol, for its figures to be compared with the published ones
    "Token Merging for Fast Stable Diffusion": _ASKED,
    "tabSD": _ASKED,
    "tabSDa1": _ASKED,
    "tabSDa2": {**_ASKED, "dtype": "bfloat16"},
}
_PICTURES = 2000  # of a row, in every published table
_USUAL = "FID (pytorch-fid)"  # published tables are pytorch-fid's, as this harness names it
_DISTANCES = {"Token Merging for Fast Stable Diffusion": f"{_USUAL} (5000 reference images, cropped to 512)"}


def published_rows(results: Results) -> Sequence[Mapping[str, Any]]:
    rows: Sequence[Mapping[str, Any]] = results.published.get("rows") or []
    return rows


def published_source(results: Results) -> str:
    return str(results.published.get("source") or "published")


def published_for(results: Results, row: Row) -> Mapping[str, Any] | None:
    if row.role == NULL:
        return None
    return next((other for other in published_rows(results) if _same(other, row)), None)


def comparability(results: Results) -> list[tuple[str, str, str]]:
    """Compare the conditions of the run with the published ones: (what, this run, published)."""
    setup = SETUPS.get(published_source(results), {})
    here = _conditions(results)
    return [(what, here.get(what, "not recorded"), there) for what, there in setup.items()]


def departures(results: Results) -> list[str]:
    """List where a run is not what the published table's protocol asks for, as `steps 2 in place of 50`."""
    source = published_source(results)
    asked = ASKED.get(source, {})
    if not asked:
        return []
    labels = "those of the labels"
    counts = sorted({row.images for row in results.rows if row.images} - {_PICTURES})
    found = [(name, results.protocol.get(name, wanted), wanted) for name, wanted in asked.items()]
    found += [("prompts", (results.protocol.get("prompts") or {}).get("file") or labels, labels)]
    found += [("images per row", counts[0] if counts else _PICTURES, _PICTURES)]
    found += [("distance", results.distance, _DISTANCES.get(source, _USUAL))]
    told = [(name, here, wanted) for name, here, wanted in found if here != wanted]
    return [f"{name} {setting_text(here)} in place of {setting_text(wanted)}" for name, here, wanted in told]


def comparable_words(results: Results) -> str:
    """Say how far the published figures can be compared with those of the run."""
    if not published_rows(results):
        return "No published table belongs to this protocol; a number means nothing without its protocol's name."
    different = departures(results)
    start = f"This is not the published protocol: {', '.join(different)}. " if different else ""
    return start + (
        "Compare the direction of differences to the untouched pipeline and ratios of times, not values: they move "
        "with weights, resizing and random numbers, and published ones come without intervals."
    )


def _conditions(results: Results) -> dict[str, str]:
    """Describe the run in the terms of the published setup, from whatever the protocol and environment record."""
    protocol = results.protocol

    def told(key: str, pattern: str = "{}") -> str:
        value = protocol.get(key)
        return "" if value in (None, "") else pattern.format(setting_text(value))

    timed = (protocol.get("time") or {}).get("batch") or protocol.get("batch")
    counts = sorted({row.images for row in results.rows if row.images})
    size = " x ".join(filter(None, (told("width"), told("height"))))
    sampling = [told("steps", "{} steps"), told("guidance", "guidance {}"), size]
    if told("scheduler") != "stored":  # the model's own
        sampling.append(told("scheduler", "scheduler {}"))
    kinds = {row.memory.kind for row in results.rows if row.memory.kind}
    found = {
        "Model": told("model"),
        "Sampling": ", ".join(part for part in sampling if part),
        "Precision": _PRECISIONS.get(told("dtype"), told("dtype")),
        "Images per row": " to ".join(str(count) for count in dict.fromkeys([*counts[:1], *counts[-1:]])),
        "Reference": _reference(protocol.get("reference")),
        "Distance": results.distance or "",
        "Hardware": results.hardware,
        "Time": f"batch of {timed}" if timed else "",
        "Memory": f"growth of {', '.join(sorted(kinds))} per +1 batch" if kinds else "not measured",
    }
    return {what: text for what, text in found.items() if text}


def _reference(value: Any) -> str:
    if not isinstance(value, Mapping):
        return "" if value is None else setting_text(value)
    count = f"{value['count']} images" if value.get("count") else ""
    resized = {"crop": "resized and cropped to {0} x {0}", "stretch": "stretched to {0} x {0}"}
    words = resized.get(str(value.get("resize")), "").format(value.get("size"))
    each = f"the first {value['per_class']} of each class" if value.get("per_class") else ""
    return ", ".join(filter(None, (str(value.get("source") or ""), count, each, words)))


def _same(published: Mapping[str, Any], row: Row) -> bool:
    settings = {key: value for key, value in published.items() if key != "label" and key not in FIGURES}
    wanted = {key: setting_text(value) for key, value in settings.items() if value is not None}
    if _bare(str(published.get("label", ""))) != _bare(row.record.label or ""):
        return False
    if row.role == BASELINE:
        return not wanted
    named = {key: value for key, value in row.settings.items() if key in wanted}
    told = {key: setting_text(value) for key, value in named.items()}
    return told == wanted and _same_program(row, named)


def _same_program(row: Row, named: Mapping[str, Any]) -> bool:
    if named == row.settings:
        return True
    try:
        method = known_method(row.record.method)
        return PatchConfig.preset(method, **row.settings) == PatchConfig.preset(method, **named)
    except ElfattError:  # phases of its own, whose settings are not known
        return False


def _bare(label: str) -> str:
    return label.replace("(Baseline)", "").replace("(baseline)", "").strip().lower()
