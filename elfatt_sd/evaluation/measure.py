"""Measure the time of every row: all are interleaved, and each round gives one ratio to the untouched pipeline."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from elfatt_sd.config import ElfattError
from elfatt_sd.devices import empty_caches, is_out_of_memory
from elfatt_sd.evaluation.environment import attention_kernels
from elfatt_sd.evaluation.images import denoiser, image_seed, load_protocol_pipeline, make_images, row_patch, to_uint8
from elfatt_sd.evaluation.prompts import run_prompts
from elfatt_sd.evaluation.protocols import FEW_REPEATS, Cell, Protocol, Time
from elfatt_sd.evaluation.provenance import image_environment
from elfatt_sd.evaluation.run import TIME_FILE, Run
from elfatt_sd.families import step_denoisers
from elfatt_sd.files import write_json
from elfatt_sd.measuring.clock import CallTimer, Spread, Stopwatch, Turn, interleave, now, ratios
from elfatt_sd.measuring.machine import read_clocks

WARMUP_STEPS = 5  # enough for every phase of the presets
Report = Callable[[str], None]


@torch.no_grad()
def timed_call(
    pipe: Any, protocol: Protocol, cell: Cell, prompts: Sequence[str], seeds: Sequence[int]
) -> dict[str, float]:
    """Run a row once, from the prompts to uint8 images in main memory."""
    device = denoiser(pipe).device
    with row_patch(pipe, cell, seeds[0]), CallTimer(step_denoisers(pipe).values(), device) as calls:
        gc.collect()
        with Stopwatch(device) as watch:
            to_uint8(make_images(pipe, protocol, prompts, seeds))
        return {"end_to_end": watch.seconds / len(seeds), "unet": calls.seconds() / len(seeds)}


def measure_time(run: Run, report: Report = print) -> dict[str, Any]:
    """Time all rows and write `time.json` as a whole; nothing is taken over from an earlier attempt."""
    protocol, settings = run.protocol, run.protocol.time or Time()
    pipe = load_protocol_pipeline(protocol)
    environment = image_environment(protocol, pipe)
    run.check_environment(environment)
    timing = _Timing(pipe, protocol, settings, report)
    clocks = timing.run()
    data = {
        "format": 1,
        "identity": protocol.identity,
        "measured": now(),
        "batch": timing.batch,
        "repeats": settings.repeats,
        "warmup": settings.warmup,
        "note": few_repeats(settings.repeats),
        "ratio": "seconds of the baseline / seconds of the row, in the same round",
        "environment": environment,
        "clocks": clocks,
        "rows": {cell.name: timing.row(cell) for cell in protocol.cells},
        "errors": timing.errors,
    }
    write_json(run.folder / TIME_FILE, data)
    return data


class _Timing:
    """The rounds over all rows, and what they gave."""

    def __init__(self, pipe: Any, protocol: Protocol, settings: Time, report: Report) -> None:
        self.pipe, self.protocol, self.settings, self.report = pipe, protocol, settings, report
        self.batch = settings.batch or protocol.batch
        self.prompts = cycled_prompts(protocol, self.batch)
        self.rounds: dict[str, list[dict[str, float]]] = {cell.name: [] for cell in protocol.cells}
        self.failed: dict[str, str] = {}  # also those that ran out of memory, which is a result
        self.errors: dict[str, str] = {}

    def run(self) -> list[dict[str, Any]]:
        """Time all rows, interleaved, and return the device's clocks before and after each round."""
        device, numbers = denoiser(self.pipe).device, range(-self.settings.warmup, self.settings.repeats)
        clocks = [read_clocks(device)]
        for turns in interleave([*self.rounds], self._take, numbers, lose=self._lose):
            for turn, seconds in turns:
                if turn.number >= 0:
                    self.rounds[turn.name].append(seconds)
            clocks.append(read_clocks(device))
        return clocks

    def _take(self, turn: Turn) -> dict[str, float]:
        measured = turn.number >= 0
        label = f"round {turn.number + 1} of {self.settings.repeats}" if measured else "warm-up"
        self.report(f"time: {label}, row {turn.place} of {len(self.rounds)}, {turn.name}")
        cell, steps = self.protocol.cell(turn.name), self.protocol.steps
        seeds = [image_seed(self.protocol, cell, index) for index in range(self.batch)]
        protocol = dataclasses.replace(self.protocol, steps=steps if measured else min(WARMUP_STEPS, steps))
        return timed_call(self.pipe, protocol, cell, self.prompts, seeds)

    def _lose(self, turn: Turn, error: Exception) -> None:
        if is_out_of_memory(error):
            self.failed[turn.name] = f"out of memory at batch {self.batch}"
        else:
            self.errors[turn.name] = self.failed[turn.name] = reason("time not measured", error)

    def row(self, cell: Cell) -> dict[str, Any]:
        if cell.name in self.failed:
            return {"failed": self.failed[cell.name]}
        baseline = self.protocol.baseline.name
        untouched = [] if baseline in self.failed else self.rounds[baseline]
        summary = summarize_time(self.rounds[cell.name], untouched, self.settings.scopes)
        return {**summary, "attention_kernels": attention_kernels(self.pipe, cell)}


def reason(what: str, error: Exception) -> str:
    """Say in one line why a row has no figures; what a user can mend says so itself."""
    if isinstance(error, ElfattError):
        return str(error)
    lines = str(error).strip().splitlines()
    return ": ".join([what, type(error).__name__, *lines[:1]])


def few_repeats(repeats: int) -> str | None:
    return f"only {repeats} repeats; take {FEW_REPEATS} or more" if repeats < FEW_REPEATS else None


def summarize_time(
    own: Sequence[Mapping[str, float]], baseline: Sequence[Mapping[str, float]], scopes: Sequence[str]
) -> dict[str, Any]:
    """Return median, spread and all values of each scope, and the speed-up round by round."""
    return {scope: _scope(*([seconds[scope] for seconds in each] for each in (own, baseline))) for scope in scopes}


def _scope(values: Sequence[float], untouched: Sequence[float]) -> dict[str, Any]:
    spread, speeds = Spread.over(values), ratios(untouched, values)
    ratio = Spread.over(speeds) if speeds else None
    return {
        "seconds_per_image": spread.median,
        "spread": [spread.min, spread.max],
        "values": [*values],
        "ratio": {"median": ratio.median, "low": ratio.min, "high": ratio.max, "values": [*speeds]} if ratio else None,
    }


def cycled_prompts(protocol: Protocol, count: int) -> list[str]:
    prompts = run_prompts(protocol)
    return [prompts[index % len(prompts)].text for index in range(count)]


def free_memory() -> None:
    """Give back what is no longer used, so that what comes next finds the device empty."""
    gc.collect()
    empty_caches()
