"""Time and memory of untrained models over the size of the image: forward, and a step of training."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from elfatt_sd.files import write_json
from elfatt_sd.measure import Comparison, PeakMeter, Progress, Turn, timed
from tools.vision.models import timed_input, timed_model
from tools.vision.training import OutOfTime

PIXELS = (64, 128, 224, 512, 1024)
SIX = ("softmax", "elfatt", "effatt", "local", "agent", "focused")
SIZES = {"vit": PIXELS, "pyramid": PIXELS, "sequence": (1024, 2048, 4096)}
MODELS = {"vit": "vit", "pyramid": "cswin-t", "sequence": "sequence"}
KINDS = ("forward", "step")
ROUNDS = 5
LONGEST = 15.0  # seconds that a call may take
SHORTEST = 0.1  # seconds of a reading; shorter calls are repeated
SMALLEST = 224  # from this size on, memory is measured


def rows_of(name: str) -> Sequence[str]:
    """Return the rows of a model: those that the paper has for sequences, or all."""
    return ("softmax", "elfatt", "local", "agent") if name == "sequence" else SIX


def measure_all(
    out: Path, models: Sequence[str], device: torch.device, deadline: float, tell: Progress, largest: int = 2**30
) -> None:
    """Measure what has no file yet, from small to large; after the deadline, `OutOfTime` comes between two sizes."""
    orders = [(name, kind, size) for name in models for kind in KINDS for size in SIZES[name] if size <= largest]
    for done, (name, kind, size) in enumerate(orders):
        tell("measuring", done, len(orders))
        path = out / "speed" / f"{name}-{kind}-{size}.json"
        if path.exists():
            continue
        if time.monotonic() > deadline:
            raise OutOfTime
        before = {each: times_of(out, name, kind).get(each, {}) for each in rows_of(name)}
        expected = {row: _expected(times, size) for row, times in before.items()}
        rows = [row for row, seconds in expected.items() if seconds <= LONGEST]
        found: dict[str, Any] = {"model": name, "kind": kind, "size": size, "device": str(device)}
        found |= {
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "times": _times(name, kind, size, rows, device),
        }
        found["left_out"] = {row: seconds for row, seconds in expected.items() if seconds > LONGEST}
        if kind == "step" and size >= SMALLEST:
            found["bytes"] = {row: _bytes(name, row, size, device) for row in rows}
        write_json(path, found)
    tell("measuring", len(orders), len(orders))


def call_of(name: str, kind: str, row: str, size: int, device: torch.device) -> Callable[[], object]:
    """Return a call of an untrained model: forward, or forward, backward and AdamW."""
    model, given = timed_model(MODELS[name], row).to(device), timed_input(name, size).to(device)
    if kind == "forward":
        model.eval()
        return torch.no_grad()(lambda: model(given))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(given).square().mean().backward()
        optimizer.step()

    return step


def _times(name: str, kind: str, size: int, rows: Sequence[str], device: torch.device) -> dict[str, list[float]]:
    calls = {row: call_of(name, kind, row, size, device) for row in rows}

    def take(turn: Turn) -> float:
        once = timed(calls[turn.name], device)
        return once if once > SHORTEST else timed(calls[turn.name], device, math.ceil(SHORTEST / max(once, 1e-4)))

    compared = Comparison([*rows], take, ROUNDS)
    compared.warm_up()
    compared.run()
    return compared.times


def _expected(times: Mapping[int, Sequence[float]], size: int) -> float:
    """Return the seconds that a call may take at most, as its time grows with the square of the pixels at most."""
    if not times:
        return 0.0
    last = max(times)
    return statistics.median(times[last]) * math.pow(size / last, growth(times, least=2.0))


def growth(times: Mapping[int, Sequence[float]], least: float = 0.0) -> float:
    """Fit the exponent of time over the side, by the medians of the rounds; at least two sizes, or `least`."""
    if len(times) < 2:
        return least
    points = sorted(times)[-2:] if least else sorted(times)
    own = [math.log(statistics.median(times[size])) for size in points]
    return max(least, statistics.linear_regression([math.log(size) for size in points], own).slope)


def times_of(out: Path, name: str, kind: str) -> dict[str, dict[int, list[float]]]:
    """Return the seconds of each round, by row and size, that are measured so far."""
    found: dict[str, dict[int, list[float]]] = {}
    for path in sorted((out / "speed").glob(f"{name}-{kind}-*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        for row, times in data["times"].items():
            found.setdefault(row, {})[data["size"]] = times
    return found


def _bytes(name: str, row: str, size: int, device: torch.device) -> int | None:
    """Return what a first step of training takes beyond the model itself, in a process of its own."""
    words = [sys.executable, "-m", "tools.vision", "peak", name, row, str(size), str(device)]
    done = subprocess.run(words, capture_output=True, text=True)
    return int(done.stdout) if done.returncode == 0 else None


def peak(name: str, row: str, size: int, device: torch.device) -> int:
    """Measure that in this process."""
    call = call_of(name, "step", row, size, device)
    meter = PeakMeter(device)
    meter.restart()
    before = meter.read() or 0
    call()
    return (meter.read() or 0) - before
