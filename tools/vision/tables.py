"""The tables of docs/vision.md, from the files of a folder."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from elfatt_sd.benchmarking.report import clock, table_lines
from elfatt_sd.evaluation.statistics import ClassEstimate, verdict
from elfatt_sd.measure import Spread, busy, ratios
from tools.pages.blocks import check_markers, check_results, fill_blocks
from tools.vision import scenes
from tools.vision.models import BASE
from tools.vision.speed import KINDS, SIZES, growth, rows_of, times_of
from tools.vision.training import TABLES, Table, file_of

NONE = "not yet run"
FITTED = 4  # sizes at most, the largest ones, to which an exponent is fitted
_WORDS = {"forward": "Forward", "step": "A training step"}


def fill_page(page: Path, out: Path) -> None:
    """Fill the tables of a page, and draw some scenes into `images/vision.png` next to it.

    Args:
        page: with markers `<!-- vision NAME -->`, of a table or a model.
        out: folder of the files.

    Raises:
        ElfattError: the folder is not there, or the page has no marker.
    """
    check_results(out)
    text = page.read_text(encoding="utf-8")
    check_markers(text, ["vision"])
    made = dict.fromkeys(TABLES, trained) | {"heads": heads}
    filled = fill_blocks(text, "vision", lambda name, _: made.get(name, timed)(out, name))
    page.write_text(filled, encoding="utf-8")
    draw(page.parent / "images" / "vision.png")


def draw(path: Path) -> None:
    """Draw eight scenes of `partners`, and below them eight of `matching`."""
    drawn = [task(8, torch.Generator().manual_seed(1)).images for task in (scenes.partners, scenes.matching)]
    padded = torch.nn.functional.pad(torch.cat(drawn), (2, 2, 2, 2), value=1.0)
    image = padded.view(2, 8, *padded.shape[1:]).permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)
    pixels = Image.fromarray(((image + 1) * 127.5).round().byte().numpy())
    pixels.resize((3 * pixels.width, 3 * pixels.height), Image.Resampling.NEAREST).save(path, optimize=True)


def trained(out: Path, name: str) -> str:
    """Return the table of the scores of trained models."""
    table = TABLES[name]
    found = {row: _runs(out, name, row, table) for row in table.rows}
    scores = [each for each in (table.score, table.pattern) if each]
    head = ["row"] + [text for each in scores for text in (f"{each}, % (each seed)", f"points more than `{BASE}`")]
    lines = [[*head, "steps", "seconds a seed"]]
    for row, runs in found.items():
        cells = [cell for score in scores for cell in (_mean(runs, score), _difference(row, found, score))]
        steps = sorted({run["steps"] for run in runs.values()})
        seconds = f"{statistics.mean(run['seconds'] for run in runs.values()):.0f}" if runs else ""
        lines.append([f"`{row}`", *cells, ", ".join(map(str, steps)), seconds])
    return "\n".join([*table_lines(lines), ""])


def heads(out: Path, _: str) -> str:
    """Return the table of how far the heads of trained models are from exact attention."""
    lines = [["table", "row", *(f"{half} heads, % (least to most of the layers)" for half in ("global", "local"))]]
    for name, table in TABLES.items():
        for row in table.rows:
            found = [run["heads"] for run in _runs(out, name, row, table).values() if run.get("heads")]
            cells = []
            for half in ("global", "local"):
                layers = [
                    100 * statistics.mean(each) for each in zip(*(own.get(half, []) for own in found), strict=True)
                ]
                spread = f"{statistics.mean(layers):.0f} ({min(layers):.0f} to {max(layers):.0f})" if layers else ""
                cells.append(spread)
            if any(cells):
                lines.append([name, f"`{row}`", *cells])
    return "\n".join([*table_lines(lines), ""])


def _runs(out: Path, name: str, row: str, table: Table) -> dict[int, dict[str, Any]]:
    """Return what was written so far, by seed."""
    paths = {seed: file_of(out, name, row, seed) for seed in range(table.seeds)}
    return {seed: json.loads(path.read_text(encoding="utf-8")) for seed, path in paths.items() if path.exists()}


def _mean(runs: Mapping[int, Mapping[str, Any]], score: str) -> str:
    if not runs:
        return NONE
    own = [100 * statistics.mean(run["scores"][score]) for run in runs.values()]
    return f"{statistics.mean(own):.1f} ({', '.join(f'{value:.1f}' for value in own)})"


def _difference(row: str, found: Mapping[str, Mapping[int, Mapping[str, Any]]], score: str) -> str:
    """Compare with `BASE` scene by scene, in the mean over the seeds that both have."""
    seeds = sorted({*found[row]} & {*found.get(BASE, {})})
    if row == BASE or not seeds:
        return ""
    moves = [
        100 * (torch.tensor(found[row][seed]["scores"][score]) - torch.tensor(found[BASE][seed]["scores"][score]))
        for seed in seeds
    ]
    difference = torch.stack(moves).double().mean(0)
    estimate = ClassEstimate.mean(difference, range(len(difference)))
    interval = estimate.interval()
    said = verdict(interval, estimate.classes, lower_is_better=False)
    low, high = interval or (estimate.value, estimate.value)
    return f"{estimate.value:+.1f} ({low:+.1f} to {high:+.1f}), {said}"


def timed(out: Path, name: str) -> str:
    """Return the tables of time and memory of a model."""
    parts, memory = [], _bytes(out, name)
    for kind in KINDS:
        found = times_of(out, name, kind)
        sizes = [size for size in SIZES[name] if any(size in times for times in found.values())]
        if not sizes:
            parts += [f"{_WORDS[kind]}: {NONE}.", ""]
            continue
        lines = [[_WORDS[kind], *map(str, sizes), "exponent", "times as fast as `softmax`"]]
        for row in rows_of(name):
            times = found.get(row, {})
            cells = [clock(statistics.median(times[size])) if size in times else "" for size in sizes]
            lines.append([f"`{row}`", *cells, _exponent(name, times), _speed(found, row)])
        parts += [*table_lines(lines), ""]
        if shaky := [str(size) for size in sizes if busy(each[size] for each in found.values() if size in each)]:
            parts += [f"At {', '.join(shaky)} equal runs differ by more than a fifth: the machine was busy.", ""]
    if memory:
        sizes = sorted({size for own in memory.values() for size in own})
        lines = [["MiB of a training step", *map(str, sizes)]]
        for row, own in memory.items():
            lines.append([f"`{row}`", *(f"{value / 2**20:.0f}" if (value := own.get(size)) else "" for size in sizes)])
        parts += [*table_lines(lines), ""]
    return "\n".join(parts)


def _exponent(name: str, times: Mapping[int, Sequence[float]]) -> str:
    """Return the exponent of time over the tokens, which grow with the square of an image's side."""
    largest = sorted(times)[-FITTED:]
    if len(largest) < 3:
        return ""
    return f"{growth({size: times[size] for size in largest}) / (1 if name == 'sequence' else 2):.2f}"


def _speed(found: Mapping[str, Mapping[int, Sequence[float]]], row: str) -> str:
    base = found.get("softmax", {})
    both = sorted({*base} & {*found.get(row, {})})
    if row == "softmax" or not both:
        return ""
    return f"{Spread.over(ratios(base[both[-1]], found[row][both[-1]])).words()} at {both[-1]}"


def _bytes(out: Path, name: str) -> dict[str, dict[int, int | None]]:
    found: dict[str, dict[int, int | None]] = {row: {} for row in rows_of(name)}
    for path in sorted((out / "speed").glob(f"{name}-step-*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        for row, value in data.get("bytes", {}).items():
            found[row][data["size"]] = value
    return found if any(found.values()) else {}
