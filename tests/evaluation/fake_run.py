"""A run as the harness leaves it, drawn instead of generated: pictures with visible differences and made-up figures."""

import json
import math
import random
from pathlib import Path

from PIL import Image, ImageDraw, ImageFilter

from elfatt_sd.files import sha256_of_file

COLORS = {
    "red": "#d7263d",
    "blue": "#1b6ca8",
    "green": "#2e933c",
    "yellow": "#f4c20d",
    "purple": "#7b3fa0",
    "orange": "#f46036",
}
SHAPES = ("circle", "square", "triangle", "star")
METHODS = (("tome", "ToMe-SD", 2.2), ("agent", "Agent-SD", 3.4), ("elfatt", "ELFATT-SD", 1.4))
PUBLISHED = {
    "tome": {0.1: (30.7, 0.788, 0.80), 0.3: (30.6, 0.748, 0.80), 0.5: (30.9, 0.714, 0.70)},
    "agent": {0.1: (30.2, 0.794, 1.00), 0.3: (30.3, 0.760, 1.00), 0.5: (30.7, 0.724, 0.70)},
    "elfatt": {0.1: (30.2, 0.772, 0.80), 0.3: (30.4, 0.739, 0.75), 0.5: (30.4, 0.707, 0.70)},
}
PICTURES = 64  # of a row, by the results; the folder has the first few
FAILED = "agent-0.5"
NO_MEMORY = "tome-0.3"


def prompt(index: int) -> str:
    names = list(COLORS)
    return f"a {names[index % 6]} {SHAPES[index % 4]} on a striped {names[(index * 5 + 2) % 6]} background"


def picture(index: int, change: float, size: int = 256) -> Image.Image:
    """Draw the scene of an index; `change` moves, blurs and tints it."""
    names, noise = list(COLORS), random.Random(index)
    image = Image.new("RGB", (size, size), "white")
    draw = ImageDraw.Draw(image)
    width = 12 + index % 3 * 6
    for left in range(-size, size * 2, 2 * width):
        bend = change * 12
        draw.polygon(
            [(left, 0), (left + width, 0), (left + width + 60 + bend, size), (left + 60 + bend, size)],
            fill=COLORS[names[(index * 5 + 2) % 6]],
        )
    x, y = noise.uniform(0.35, 0.65) * size + 4 * change, noise.uniform(0.35, 0.65) * size - 3 * change
    radius, sides = size * 0.24, (60, 4, 3, 10)[index % 4]
    reach = [radius * (0.45 if sides == 10 and corner % 2 else 1) for corner in range(sides)]
    corners = [
        (x + far * math.sin(2 * math.pi * corner / sides), y - far * math.cos(2 * math.pi * corner / sides))
        for corner, far in enumerate(reach)
    ]
    draw.polygon(corners, fill=COLORS[names[index % 6]])
    return image.filter(ImageFilter.GaussianBlur(change / 2)) if change else image


def build_run(folder: Path, *, images: int = 12, size: int = 128) -> dict:
    """Write a run of 11 rows, of which one failed and one has no memory figures; return its results."""
    chance = random.Random(0)
    rows = [
        _row("sd", "SD (Baseline)", "sd", {}, "baseline", 0.0, chance),
        _row("sd-null", "SD, other seeds", "sd", {}, "null", 6.0, chance),
        *(
            _row(f"{method}-{ratio}", label, method, {"ratio": ratio}, "method", change * ratio, chance)
            for method, label, change in METHODS
            for ratio in (0.1, 0.3, 0.5)
        ),
    ]
    for row in rows:
        if row["cell"] == FAILED:
            row |= dict.fromkeys(("distances", "paired", "accuracy", "most_changed", "time", "memory"))
            row["failed"] = "picture 7 is black (all pixels 0); 8 of 12 pictures were made"
        if row["cell"] == NO_MEMORY:
            row["memory"] = None
        _write_cell(folder, row, images, size)
    results = _results(rows)
    save(folder, results)
    return results


def build_sweep(folder: Path, *, images: int = 2, size: int = 32) -> dict:
    """Write a run of 40 rows of many methods with long labels, some swept, with UNet time and no memory."""
    chance = random.Random(1)
    rows = [_row("sd", "SD (Baseline)", "sd", {}, "baseline", 0.0, chance)]
    rows.append(_row("sd-null", "SD, other seeds", "sd", {}, "null", 6.0, chance))
    for number in range(20):
        label = f"blocks of a stratified sample, drawn anew in every layer, from step {number} on"
        rows.append(_row(f"late{number}", label, "custom", {}, "method", 0.2 + number / 20, chance))
    for ratio in (0.3, 0.5):
        for size_of_block in (32, 56, 81, 128, 227, 512):
            settings = {"ratio": ratio, "block_size": size_of_block}
            label = "ELFATT with blocks along a curve in the first fifth of all steps"
            name = f"curve-ratio{ratio}-block_size{size_of_block}"
            rows.append(_row(name, label, "custom", settings, "method", 0.1 + ratio, chance))
    for until in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6):
        rows.append(_row(f"until{until}", "ToMe, then exact", "custom", {"until": until}, "method", until, chance))
    for row in rows:
        row["memory"] = None
        del row["time"]["end_to_end"]
        _write_cell(folder, row, images, size)
    results = _results(rows) | {"published": None}
    save(folder, results)
    return results


def _results(rows: list[dict]) -> dict:
    return {
        "format": 1,
        "name": "toy_full",
        "description": "The shape of the paper's table on the embedded toy pipeline.",
        "identity": "4f1d0c6e5b",
        "protocol": {
            "name": "toy_full", "model": "toy", "scheduler": "stored", "steps": 25, "guidance": 7.5, "height": 256,
            "width": 256, "dtype": "float32", "batch": 4, "labels": "toy", "template": "{label}", "seed": 0, "limit": 0,
            "reference": {"source": "toy", "count": 2048, "size": 0}, "extractors": ["toy"],
            "time": {"repeats": 5, "warmup": 1, "batch": 2}, "cells": [{"name": row["cell"]} for row in rows],
        },
        "environment": {
            "elfatt_sd": "0.1.0", "commit": "2051285f36c91da5de5095001b824bf8c43c1990", "python": "3.11.7",
            "platform": "Linux-x86_64", "packages": {"torch": "2.15.0", "diffusers": "0.42.1"},
            "device": "2 cores of AMD EPYC", "cpu": "AMD EPYC", "cpu_cores": 2, "cpu_threads": 2,
            "keeps_freed_memory": False, "ram_gib": 15.625, "cuda": None,
            "attention_backends": {"scaled_dot_product_attention": ["flash (CPU)", "math"]},
        },
        "rows": rows,
        "reference": {"FD-toy": {"source": "renders", "count": 10_000, "features": 32}},
        "published": {
            "source": "tabSD",
            "rows": [
                {"label": "SD (Baseline)", "FID": 31.0, "seconds_per_image": 0.768, "gb_per_image": 0.80},
                *(
                    {"label": label, "ratio": ratio, "FID": fid, "seconds_per_image": time, "gb_per_image": memory}
                    for method, label, _ in METHODS
                    for ratio, (fid, time, memory) in PUBLISHED[method].items()
                ),
            ],
        },
    }  # fmt: skip


def save(folder: Path, results: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, ensure_ascii=False), encoding="utf-8")


def _row(cell, label, method, settings, role, change, chance) -> dict:  # type: ignore[no-untyped-def]
    baseline, null, ratio = role == "baseline", role == "null", settings.get("ratio", 0)
    difference = 0.0 if baseline else 0.21 if null else round(change * 1.9 - 0.45, 3)
    half = 0.62 if null else 0.55
    verdict = "worse" if difference > half else "better" if difference < -half else "no difference shown"
    distances = {"FD-toy": _around(18.4 + difference, 1.6), "KD-toy": _around(0.0121 + difference / 900, 0.002)}
    if not baseline:
        distances["FD-toy"]["difference"] = _around(difference, half) | {"verdict": verdict}
        distances["KD-toy"]["difference"] = _around(difference / 900, half / 900) | {"verdict": verdict}
    psnr, ssim, cosine = (12.4, 0.47, 0.69) if null else (34 - 5.2 * change, 0.97 - change / 12, 0.99 - change / 20)
    pairs = {
        "classes": list(range(PICTURES)),
        "psnr": _spread(psnr, 2.1) | {"unit": "dB", "identical": 0, "pictures": _each(psnr, 2.1)},
        "ssim": _spread(ssim, 0.02) | {"pictures": _each(ssim, 0.02)},
        "cosine": _spread(cosine, 0.01),
    }
    speed = 1 + (0.55 * ratio - 0.03 * (method == "agent") if role == "method" else 0)
    slope, batches = 0.214 - 0.1 * ratio, [1, 2, 4, 8]
    return {
        "cell": cell,
        "label": label,
        "method": method,
        "settings": settings,
        "role": role,
        "images": PICTURES,
        "classes": PICTURES,
        "distances": distances,
        "paired": None if baseline else pairs,
        "accuracy": {name: _accuracy(0.95 - change / 40, baseline) for name in ("shape", "color", "mean")},
        "most_changed": [] if baseline else [3, 7, 1, 9],
        "time": {"end_to_end": _timing(3.12, speed, chance), "unet": _timing(2.61, speed + 0.02, chance)},
        "memory": {
            "gib_per_image": slope,
            "interval": [slope - 0.006, slope + 0.006],
            "intercept_gib": 0.92,
            "fit_error_gib": 0.004,
            "batches": batches,
            "peaks_gib": [0.92 + slope * batch + chance.uniform(-0.004, 0.004) for batch in batches],
            "kind": "VmHWM",
            "stages": {"text": {"gib_per_image": 0.0}, **_stages(slope)},
        },
        "failed": None,
    }


def _around(value: float, half: float) -> dict:
    return {"value": value, "interval": [value - half, value + half]}


def _spread(median: float, half: float) -> dict:
    mean = median + half / 9
    quartiles = [median - half, median + half * 0.8]
    interval = [mean - half / 5, mean + half / 5]
    return {"median": median, "mean": mean, "interval": interval, "quartiles": quartiles, "lowest": median - 2 * half}


def _each(median: float, half: float) -> list[float]:
    """One number for each picture; the fourth is the lowest."""
    return [median - 2 * half + half * ((index + PICTURES - 3) % PICTURES) / 16 for index in range(PICTURES)]


def _stages(slope: float) -> dict:
    return {"unet": {"gib_per_image": slope}, "vae": {"gib_per_image": slope * 0.7}}


def _accuracy(value: float, baseline: bool) -> dict:
    difference = {} if baseline else {"difference": _around(value - 0.95, 0.02) | {"verdict": "no difference shown"}}
    return _around(value, 0.03) | difference


def _timing(untouched: float, speed: float, chance: random.Random) -> dict:
    values = [untouched / speed * chance.uniform(0.97, 1.04) for _ in range(5)]
    ratio = {"median": speed, "low": speed - 0.04, "high": speed + 0.03}
    return {"seconds_per_image": sorted(values)[2], "values": values, "ratio": ratio}


def _write_cell(folder: Path, row: dict, images: int, size: int) -> None:
    cell = folder / "cells" / row["cell"]
    (cell / "images").mkdir(parents=True)
    change = dict((method, change) for method, _, change in METHODS).get(row["method"], 0.0)
    with (cell / "manifest.jsonl").open("w", encoding="utf-8") as lines:
        for index in range(images if row["failed"] is None else 8):
            seed = index + (1000 if row["role"] == "null" else 0)
            scene = picture(seed, change * row["settings"].get("ratio", 0), size)
            path = cell / "images" / f"{index:05d}.png"
            scene.save(path)
            record = {"index": index, "file": f"images/{path.name}", "prompt": prompt(index), "class_index": index}
            record |= {"seed": seed, "sha256": sha256_of_file(path)}
            lines.write(json.dumps(record) + "\n")
