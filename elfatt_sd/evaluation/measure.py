"""Measure time and memory of every row.

Time: all rows take turns within each round, in one process, and each round gives one ratio to the untouched pipeline.
Memory: the growth of the peak for each further image in the batch, as the slope of a least-squares line over several
batch sizes, each measured in a process of its own (`python -m elfatt_sd.evaluation.measure` is that process).
"""

from __future__ import annotations

import dataclasses
import datetime
import gc
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from elfatt_sd.config import ElfattError
from elfatt_sd.devices import is_out_of_memory, synchronize
from elfatt_sd.evaluation.environment import attention_kernels, read_clocks, read_high_water_mark, same_images
from elfatt_sd.evaluation.images import image_seed, load_protocol_pipeline, make_images, row_patch, to_uint8
from elfatt_sd.evaluation.prompts import run_prompts
from elfatt_sd.evaluation.protocols import FEW_REPEATS, Cell, Memory, Protocol, Time
from elfatt_sd.evaluation.provenance import code_hashes, image_environment
from elfatt_sd.evaluation.run import MEMORY_FILE, TIME_FILE, Run, RunFailure
from elfatt_sd.evaluation.statistics import student_quantile
from elfatt_sd.files import sha256_of_data, write_json
from elfatt_sd.typed import read_json

STAGES = ("text", "unet", "vae")
WARMUP_STEPS = 5  # enough for every phase of the presets
_GIB = 2**30
_Report = Callable[[str], None]


class UNetTimer:
    """Adds up the time of a UNet's calls, without a synchronisation inside the denoising loop on CUDA."""

    def __init__(self, unet: nn.Module, device: torch.device) -> None:
        """Take the UNet to watch and the device whose clock counts."""
        self.unet, self.device = unet, device
        self.marks: list[Any] = []
        self.handles: list[Any] = []

    def __enter__(self) -> UNetTimer:
        """Watch; what hooks of a patch do counts as part of the call."""
        self.handles = [
            self.unet.register_forward_pre_hook(lambda *_: self._mark(), prepend=True),
            self.unet.register_forward_hook(lambda *_: self._mark()),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop watching."""
        for handle in self.handles:
            handle.remove()

    def _mark(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.device))
            self.marks.append(event)
        else:
            synchronize(self.device)
            self.marks.append(time.perf_counter())

    def seconds(self) -> float:
        """Return the sum over all calls; waits for the device."""
        pairs = list(zip(self.marks[::2], self.marks[1::2], strict=True))
        if self.device.type != "cuda":
            return float(sum(end - start for start, end in pairs))
        synchronize(self.device)
        return sum(float(start.elapsed_time(end)) for start, end in pairs) / 1000


@torch.no_grad()
def timed_call(
    pipe: Any, protocol: Protocol, cell: Cell, prompts: Sequence[str], seeds: Sequence[int]
) -> dict[str, float]:
    """Run a row once, from the prompts to uint8 images in main memory.

    Returns:
        Seconds per image of each scope: `end_to_end` and `unet`.
    """
    device = pipe.unet.device
    with row_patch(pipe, cell, seeds[0]), UNetTimer(pipe.unet, device) as timer:
        gc.collect()
        synchronize(device)
        start = time.perf_counter()
        to_uint8(make_images(pipe, protocol, prompts, seeds))
        synchronize(device)
        total = time.perf_counter() - start
        return {"end_to_end": total / len(seeds), "unet": timer.seconds() / len(seeds)}


def measure_time(run: Run, report: _Report = print) -> dict[str, Any]:
    """Time all rows and write `time.json` as a whole; nothing is taken over from an earlier attempt.

    Args:
        run: its protocol's `time` says how.
        report: gets a line for each row of each round.

    Returns:
        What was written: for each row and scope all values, their median and spread, and the speed-up, and which
        kernels its layers attend with; `errors` says which rows could not be timed for another reason than memory, and
        may be later.

    Raises:
        ElfattError: the pipeline cannot be loaded, or would not make the run's images.
    """
    protocol, settings = run.protocol, run.protocol.time or Time()
    batch = settings.batch or protocol.batch
    prompts = _cycled_prompts(protocol, batch)
    pipe = load_protocol_pipeline(protocol)
    device = pipe.unet.device
    environment = image_environment(protocol, pipe)
    run.check_environment(environment)
    failed: dict[str, str] = {}
    errors: dict[str, str] = {}
    rounds: dict[str, list[dict[str, float]]] = {cell.name: [] for cell in protocol.cells}

    def attempt(cell: Cell, steps: int) -> dict[str, float] | None:
        seeds = [image_seed(protocol, cell, index) for index in range(batch)]
        try:
            return timed_call(pipe, dataclasses.replace(protocol, steps=steps), cell, prompts, seeds)
        except Exception as error:
            if is_out_of_memory(error):
                failed[cell.name] = f"out of memory at batch {batch}"
            else:
                errors[cell.name] = failed[cell.name] = _reason("time not measured", error)
        return None

    clocks = [read_clocks(device)]
    for number in range(-settings.warmup, settings.repeats):
        label = f"round {number + 1} of {settings.repeats}" if number >= 0 else "warm-up"
        turn = number % len(protocol.cells)
        for place, cell in enumerate([*protocol.cells[turn:], *protocol.cells[:turn]], 1):
            if cell.name in failed:
                continue
            report(f"time: {label}, row {place} of {len(protocol.cells)}, {cell.name}")
            seconds = attempt(cell, protocol.steps if number >= 0 else min(WARMUP_STEPS, protocol.steps))
            if number >= 0 and seconds is not None:
                rounds[cell.name].append(seconds)
        clocks.append(read_clocks(device))
    untouched = [] if protocol.baseline.name in failed else rounds[protocol.baseline.name]
    rows: dict[str, dict[str, Any]] = {}
    for cell in protocol.cells:
        if cell.name in failed:
            rows[cell.name] = {"failed": failed[cell.name]}
        else:
            summary = summarize_time(rounds[cell.name], untouched, settings.scopes)
            rows[cell.name] = {**summary, "attention_kernels": attention_kernels(pipe, cell)}
    data = {
        "format": 1,
        "identity": protocol.identity,
        "measured": _now(),
        "batch": batch,
        "repeats": settings.repeats,
        "warmup": settings.warmup,
        "note": few_repeats(settings.repeats),
        "ratio": "seconds of the baseline / seconds of the row, in the same round",
        "environment": environment,
        "clocks": clocks,
        "rows": rows,
        "errors": errors,
    }
    write_json(run.folder / TIME_FILE, data)
    return data


def _reason(what: str, error: Exception) -> str:
    """Say in one line why a row has no figures; what a user can mend says so itself."""
    if isinstance(error, ElfattError):
        return str(error)
    lines = str(error).strip().splitlines()
    return ": ".join([what, type(error).__name__, *lines[:1]])


def few_repeats(repeats: int) -> str | None:
    """Return a warning for too few rounds, or None."""
    return f"only {repeats} repeats; take {FEW_REPEATS} or more" if repeats < FEW_REPEATS else None


def summarize_time(
    own: Sequence[Mapping[str, float]], baseline: Sequence[Mapping[str, float]], scopes: Sequence[str]
) -> dict[str, Any]:
    """Return median, spread and all values of each scope, and the speed-up round by round.

    Args:
        own: seconds per image by scope, of each round.
        baseline: the same of the untouched pipeline; empty where it failed.
        scopes: which to give.
    """
    summary: dict[str, Any] = {}
    for scope in scopes:
        values = [seconds[scope] for seconds in own]
        ratios = [before[scope] / after[scope] for before, after in zip(baseline, own, strict=False)]
        summary[scope] = {
            "seconds_per_image": statistics.median(values),
            "spread": [min(values), max(values)],
            "values": values,
            "ratio": {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios), "values": ratios}
            if ratios
            else None,
        }
    return summary


def measure_memory(run: Run, report: _Report = print) -> dict[str, Any]:
    """Measure all rows and write `memory.json` after each, so that a killed run goes on with the next row.

    Rows whose programs are the same (the untouched pipeline and the null row) share one measurement. To run out of
    memory is a result; rows that failed otherwise, or were measured in another environment, are measured again.

    Args:
        run: its protocol's `memory` says how.
        report: gets a line for each process.

    Returns:
        What was written: for each row the slope in GiB per image, intercept, fit error, peaks and stages; `errors`
        says which rows could not be measured for another reason than memory, and may be later.

    Raises:
        ElfattError: the pipeline cannot be loaded, or would not make the run's images.
    """
    protocol, settings = run.protocol, run.protocol.memory or Memory()
    environment = _present_environment(protocol)
    run.check_environment(environment)
    path = run.folder / MEMORY_FILE
    data = read_json(path, "delete it to measure anew") or {}
    before = data.get("environment", {})
    if data.get("identity") != protocol.identity or same_images(before, environment, protocol.cells):
        data = {"format": 1, "identity": protocol.identity, "measured": _now(), "environment": environment}
        data |= {"rows": {}, "programs": {}, "errors": {}}
    rows, programs, errors = data["rows"], data["programs"], data["errors"]
    for name in list(errors):
        del rows[name], errors[name]
    for cell in protocol.cells:
        program = program_of(cell)
        if cell.name in rows:
            continue
        twin = programs.get(program)
        if twin in rows:
            rows[cell.name] = {**rows[twin], "same_program_as": twin}
        else:
            try:
                rows[cell.name] = _measure_row(protocol, cell, sorted(set(settings.batches)), report)
                programs[program] = cell.name
            except (ElfattError, RunFailure) as error:
                errors[cell.name] = str(error)
                rows[cell.name] = summarize_memory([], [], str(error))
        write_json(path, data)
    return data


def program_of(cell: Cell) -> str:
    """Return a hash of what a row runs; rows of one program take the same memory."""
    return sha256_of_data([cell.config().to_dict(), cell.peer, dict(cell.settings) if cell.peer else {}])


def _present_environment(protocol: Protocol) -> dict[str, Any]:
    """Load the pipeline to see what it is, and leave the device empty for the processes that measure."""
    environment = image_environment(protocol, load_protocol_pipeline(protocol))
    free_memory()
    return environment


def free_memory() -> None:
    """Give back what is no longer used, so that what comes next finds the device empty."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _measure_row(protocol: Protocol, cell: Cell, batches: Sequence[int], report: _Report) -> dict[str, Any]:
    place = f"row {protocol.cells.index(cell) + 1} of {len(protocol.cells)}"
    results: dict[int, dict[str, Any]] = {}
    notes = []
    for batch in batches:
        report(f"memory: {place}, {cell.name}, batch {batch}")
        result = run_worker(protocol, cell, batch)
        if "failed" in result:
            notes.append(result["failed"])
            break  # a larger batch would not fit either
        if _whole(result["peaks"]) > result.get("loading", 0.0):
            results[batch] = result
        else:
            notes.append(f"batch {batch} took less than loading the model, and is left out")
    return summarize_memory(list(results), list(results.values()), "; ".join(notes) or None)


def summarize_memory(
    batches: Sequence[int], results: Sequence[Mapping[str, Any]], note: str | None = None
) -> dict[str, Any]:
    """Fit a line to the peaks of several batch sizes, over all and for each stage.

    Args:
        batches: batch sizes.
        results: what the process of each gave: `kind`, and `peaks` by kind and stage in GiB.
        note: why there are no other batches, or None.

    Returns:
        `gib_per_image` (the slope), `interval` (of the slope, 95 %), `intercept_gib`, `fit_error_gib` (root mean square
        of the residuals), `batches`, `peaks_gib`, `kind`, `stages` with the same of each stage, and `reserved` on CUDA.
        With fewer than two batches there is no slope, with fewer than three no interval.
    """
    summary: dict[str, Any] = {"batches": list(batches), "note": note, "failed": None if results else note}
    if not results:
        return summary
    kind = results[0]["kind"]
    summary |= {"kind": kind, **_line(batches, [_whole(result["peaks"]) for result in results])}
    if all(set(STAGES) <= set(result["peaks"]) for result in results):
        summary["stages"] = {stage: _line(batches, [result["peaks"][stage] for result in results]) for stage in STAGES}
    if all("reserved" in result for result in results):
        reserved = _line(batches, [_whole(result["reserved"]) for result in results])
        summary["reserved"] = {"kind": "CUDA reserved", **reserved}
    return summary


def _whole(peaks: Mapping[str, float]) -> float:
    return max(peaks.values())


def _line(batches: Sequence[int], peaks: Sequence[float]) -> dict[str, Any]:
    """Fit `peak = intercept + slope * batch` by least squares."""
    data: dict[str, Any] = {"peaks_gib": list(peaks)}
    if len(batches) < 2:
        return {"gib_per_image": None, "interval": None, "intercept_gib": None, "fit_error_gib": None, **data}
    slope, intercept = statistics.linear_regression(batches, peaks)
    residuals = [peak - intercept - slope * batch for batch, peak in zip(batches, peaks, strict=True)]
    error = math.sqrt(sum(residual**2 for residual in residuals) / len(residuals))
    return {
        "gib_per_image": slope,
        "interval": _slope_interval(batches, slope, error),
        "intercept_gib": intercept,
        "fit_error_gib": error,
        **data,
    }


def _slope_interval(batches: Sequence[int], slope: float, error: float) -> list[float] | None:
    """Return the 95 % interval of a line's slope; two points leave no error to judge it by.

    Args:
        batches: where the line was measured.
        slope: of the line.
        error: root mean square of its residuals.
    """
    count, middle = len(batches), statistics.fmean(batches)
    if count < 3:
        return None
    spread = math.sqrt((count - 2) / count * sum((batch - middle) ** 2 for batch in batches))
    half = student_quantile(0.975, count - 2) * error / spread
    return [slope - half, slope + half]


def run_worker(protocol: Protocol, cell: Cell, batch: int) -> dict[str, Any]:
    """Measure one batch size in a fresh process.

    Returns:
        What `measure_peaks` gave there, or `failed` where memory ran out.

    Raises:
        ElfattError: what was raised there, or the package was changed since this process began.
        RunFailure: the process ended in another way.
    """
    order = json.dumps({"protocol": protocol.to_dict(), "cell": cell.name, "batch": batch, "code": code_hashes()})
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "elfatt_sd.evaluation.measure"]
    done = subprocess.run(
        command, input=order, capture_output=True, text=True, env={**_single_process(os.environ), "PYTHONPATH": path}
    )
    if done.returncode == -signal.SIGKILL:
        return {"failed": f"out of memory at batch {batch}"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise RunFailure(f"memory not measured at batch {batch}: {reason}")
    result: dict[str, Any] = json.loads(lines[-1])
    if "error" in result:
        raise ElfattError(result["error"])
    return result


def _single_process(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what a launcher of several processes has put there."""
    launched = re.compile(r"(WORLD_SIZE|RANK|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_.*|TORCHELASTIC_.*|GROUP_.*)")
    return {name: value for name, value in environment.items() if not launched.fullmatch(name)}


class PeakMeter:
    """Reads the highest memory use since the last reading, and starts anew where the system allows it."""

    def __init__(self, device: torch.device) -> None:
        """Take the device whose memory counts.

        Raises:
            ElfattError: its memory cannot be read.
        """
        self.device = device
        self.kind = "CUDA allocated" if device.type == "cuda" else "VmHWM"
        if device.type not in ("cuda", "cpu") or (device.type == "cpu" and read_high_water_mark() is None):
            raise ElfattError(
                f"memory of device {device.type!r} on {sys.platform} cannot be read; accepted: CUDA, Linux."
            )
        self.resets = self.reset()

    def reset(self) -> bool:
        """Start anew from the present use; tell whether that was possible."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return True
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return False
        return True

    def read(self) -> float:
        """Return the highest use since the last reset, in GiB."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / _GIB
        return (read_high_water_mark() or 0) / _GIB

    def read_reserved(self) -> float | None:
        """Return the same of what CUDA's allocator holds, in GiB; None on the CPU."""
        return torch.cuda.max_memory_reserved(self.device) / _GIB if self.device.type == "cuda" else None


@torch.no_grad()
def measure_peaks(protocol: Protocol, cell: Cell, batch: int) -> dict[str, Any]:
    """Run a row once in this process and read the peak of each stage.

    Returns:
        `kind`, and `peaks` by stage in GiB, and `reserved` likewise on CUDA. Where the system does not let the peak
        start anew, it is the whole process's, under `all`, and `loading` is what it was before the row ran: a peak that
        is not higher is that of loading the model.
    """
    pipe = load_protocol_pipeline(protocol)
    steps = (protocol.memory or Memory()).steps or protocol.steps
    meter = PeakMeter(pipe.unet.device)
    loading = {} if meter.resets else {"loading": meter.read()}
    peaks: dict[str, float] = {}
    reserved: dict[str, float] = {}

    def close(stage: str) -> None:
        if stage in peaks or (not meter.resets and stage != "all"):
            return
        synchronize(meter.device)
        peaks[stage] = meter.read()
        held = meter.read_reserved()
        if held is not None:
            reserved[stage] = held
        meter.reset()

    handles = [
        pipe.unet.register_forward_pre_hook(lambda *_: close("text"), prepend=True),
        pipe.vae.decoder.register_forward_pre_hook(lambda *_: close("unet")),
    ]
    seeds = [image_seed(protocol, cell, index) for index in range(batch)]
    short = dataclasses.replace(protocol, steps=steps)
    try:
        with row_patch(pipe, cell, seeds[0]):
            to_uint8(make_images(pipe, short, _cycled_prompts(protocol, batch), seeds))
    finally:
        for handle in handles:
            handle.remove()
    close("vae" if meter.resets else "all")
    return {"kind": meter.kind, "peaks": peaks, **loading, **({"reserved": reserved} if reserved else {})}


def _cycled_prompts(protocol: Protocol, count: int) -> list[str]:
    prompts = run_prompts(protocol)
    return [prompts[index % len(prompts)].text for index in range(count)]


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _worker() -> None:
    """Read an order from stdin, measure, and print the result as the last line."""
    order = json.load(sys.stdin)
    protocol = Protocol.from_dict(order["protocol"])
    try:
        if order["code"] != code_hashes():
            raise ElfattError("the code of elfatt_sd was changed during the run; put it back, or give a new folder.")
        result = measure_peaks(protocol, protocol.cell(order["cell"]), order["batch"])
    except Exception as error:
        at = f"at batch {order['batch']}"
        if is_out_of_memory(error):
            result = {"failed": f"out of memory {at}"}
        else:
            result = {"error": _reason(f"memory not measured {at}", error)}
    print(json.dumps(result))


if __name__ == "__main__":
    _worker()
