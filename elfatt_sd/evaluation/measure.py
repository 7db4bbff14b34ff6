"""Measure the time of every row, interleaved, and the memory of every row, in a fresh process for each batch size.

Each round of the timing gives one ratio to the untouched pipeline.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import math
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from elfatt_sd.devices import empty_caches
from elfatt_sd.errors import ElfattError, ElfattFailure, in_plain_words, is_out_of_memory
from elfatt_sd.evaluation import generate
from elfatt_sd.evaluation.prompts import run_prompts
from elfatt_sd.evaluation.protocols import Cell, PeakMemory, Protocol, Time
from elfatt_sd.evaluation.run import MEMORY_FILE, TIME_FILE, RunFolder
from elfatt_sd.families import step_denoisers
from elfatt_sd.files import sha256_of_data, write_json
from elfatt_sd.measure import CallTimer, Comparison, PeakMeter, Spread, Stopwatch, Turn, now, ratios, student_quantile

WARMUP_STEPS = 5  # enough for every phase of the presets
_GIB = 2**30
_LAUNCHED = re.compile(r"(WORLD_SIZE|RANK|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_.*|TORCHELASTIC_.*|GROUP_.*)")
Report = Callable[[str], None]


def measure_time(run: RunFolder, report: Report = print) -> dict[str, Any]:
    """Time all rows and write `time.json` as a whole; nothing is taken over from an earlier attempt."""
    protocol, settings = run.protocol, run.protocol.time or Time()
    batch, baseline, begun = settings.batch or protocol.batch, protocol.baseline.name, now()
    pipe = generate.load_protocol_pipeline(protocol)
    environment = generate.image_environment(protocol, pipe)
    run.check_environment(environment)
    short = dataclasses.replace(protocol, steps=min(WARMUP_STEPS, protocol.steps))
    failed, errors = dict[str, str](), dict[str, str]()  # what ran out of memory has failed, which is a result

    def take(turn: Turn) -> dict[str, float]:
        label = f"round {turn.number + 1} of {settings.repeats}" if turn.number >= 0 else "warm-up"
        report(f"time: {label}, row {turn.place} of {len(protocol.cells)}, {turn.name}")
        return timed_call(pipe, protocol if turn.number >= 0 else short, protocol.cell(turn.name), batch)

    def lose(name: str, error: Exception) -> None:
        if is_out_of_memory(error):
            failed[name] = f"out of memory at batch {batch}"
        else:
            errors[name] = failed[name] = f"time not measured: {in_plain_words(error)}"

    compared = Comparison([cell.name for cell in protocol.cells], take, settings.repeats, lose=lose)
    for _ in range(settings.warmup):
        compared.warm_up()
    compared.run()
    untouched = [] if baseline in failed else compared.times[baseline]
    data = {
        "format": 1,
        "identity": protocol.identity,
        "measured": begun,
        "batch": batch,
        "repeats": settings.repeats,
        "warmup": settings.warmup,
        "ratio": "seconds of the baseline / seconds of the row, in the same round",
        "environment": environment,
        "rows": {
            name: {"failed": failed[name]} if name in failed else summarize_time(each, untouched, settings.scopes)
            for name, each in compared.times.items()
        },
        "errors": errors,
    }
    write_json(run.folder / TIME_FILE, data)
    return data


@torch.no_grad()
def timed_call(pipe: Any, protocol: Protocol, cell: Cell, batch: int) -> dict[str, float]:
    """Run a row once, from the prompts to uint8 images in main memory."""
    device = generate.denoiser(pipe).device
    prompts, seeds = _given(protocol, cell, batch)
    with generate.row_patch(pipe, cell, seeds[0]), CallTimer(step_denoisers(pipe).values(), device) as calls:
        gc.collect()
        with Stopwatch(device) as watch:
            generate.to_uint8(generate.make_images(pipe, protocol, prompts, seeds))
        return {"end_to_end": watch.seconds / batch, "unet": sum(calls.each()) / batch}


def _given(protocol: Protocol, cell: Cell, batch: int) -> tuple[list[str], list[int]]:
    """Return prompts and seeds of a batch; the prompts of the run begin again where it has fewer."""
    prompts = run_prompts(protocol)
    texts = [prompts[index % len(prompts)].text for index in range(batch)]
    return texts, [generate.image_seed(protocol, cell, index) for index in range(batch)]


def summarize_time(
    own: Sequence[Mapping[str, float]], baseline: Sequence[Mapping[str, float]], scopes: Sequence[str]
) -> dict[str, Any]:
    """Return median, spread and all values of each scope, and the speed-up round by round."""
    rows: dict[str, Any] = {}
    for scope in scopes:
        values, untouched = ([seconds[scope] for seconds in each] for each in (own, baseline))
        spread, speeds = Spread.over(values), ratios(untouched, values)
        row = {"seconds_per_image": spread.median, "spread": [spread.min, spread.max], "values": values, "ratio": None}
        if speeds:
            ratio = Spread.over(speeds)
            row["ratio"] = {"median": ratio.median, "low": ratio.min, "high": ratio.max, "values": [*speeds]}
        rows[scope] = row
    return rows


def measure_memory(run: RunFolder, report: Report = print) -> dict[str, Any]:
    """Measure all rows and write `memory.json` as a whole; rows that an attempt which was stopped finished are kept.

    Rows whose programs are the same (the untouched pipeline and the null row) share one measurement. Out of
    memory is reported as a result, and so is a system that does not tell.
    """
    protocol, begun = run.protocol, now()
    pipe = generate.load_protocol_pipeline(protocol)
    device, environment = generate.denoiser(pipe).device, generate.image_environment(protocol, pipe)
    del pipe
    free_memory()  # for the processes that measure
    told, part = PeakMeter(device).kind is not None, run.folder / f"{MEMORY_FILE}.part"
    unmeasured = f"not measured: {sys.platform} does not tell the peak of device {device.type!r}"
    run.check_environment(environment)
    rows, programs, errors = dict[str, dict[str, Any]](), dict[str, str](), dict[str, str]()
    of, known = sha256_of_data([protocol.identity, environment]), dict[str, dict[str, Any]]()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        known |= json.loads(part.read_text(encoding="utf-8")).get(of, {})
    for cell in protocol.cells:
        program = sha256_of_data([cell.config().to_dict(), cell.peer, cell.options])
        try:
            if twin := programs.get(program):
                rows[cell.name] = {**rows[twin], "same_program_as": twin}
            else:
                measured = known.get(program) if told else summarize_memory({}, None, unmeasured)
                rows[cell.name] = measured = measured or _measure_row(protocol, cell, report)
                programs[program], known = cell.name, known | ({} if measured["failed"] else {program: measured})
                write_json(part, {of: known})
        except ElfattError as error:
            errors[cell.name] = str(error)
            rows[cell.name] = summarize_memory({}, None, str(error))
    data = {"format": 1, "identity": protocol.identity, "measured": begun, "environment": environment}
    data |= {"rows": rows, "programs": programs, "errors": errors}
    write_json(run.folder / MEMORY_FILE, data)
    if not errors:
        part.unlink(missing_ok=True)
    return data


def _measure_row(protocol: Protocol, cell: Cell, report: Report) -> dict[str, Any]:
    place = f"row {protocol.cells.index(cell) + 1} of {len(protocol.cells)}"
    peaks, notes, kind = dict[int, float](), list[str](), None
    for batch in sorted(set((protocol.memory or PeakMemory()).batches)):
        report(f"memory: {place}, {cell.name}, batch {batch}")
        result = run_worker(protocol, cell, batch)
        if "failed" in result:
            notes.append(result["failed"])
            break  # a larger batch would not fit either
        kind = result["kind"]
        if result["peak"] > result["loading"]:
            peaks[batch] = result["peak"]
        else:
            notes.append(f"batch {batch} took less than loading the model, and is left out")
    return summarize_memory(peaks, kind, "; ".join(notes) or None)


def summarize_memory(peaks: Mapping[int, float], kind: str | None, note: str | None = None) -> dict[str, Any]:
    """Fit `peak = intercept + slope * batch` by least squares; three points or more give the slope an interval."""
    batches, values, count = [*peaks], [*peaks.values()], len(peaks)
    summary: dict[str, Any] = {"batches": batches, "note": note, "failed": None if peaks else note}
    if not peaks:
        return summary
    summary |= {"kind": kind, **dict.fromkeys(("gib_per_image", "interval", "intercept_gib", "fit_error_gib"))}
    if count > 1:
        slope, intercept = statistics.linear_regression(batches, values)
        error = math.sqrt(sum((peak - intercept - slope * batch) ** 2 for batch, peak in peaks.items()) / count)
        summary |= {"gib_per_image": slope, "intercept_gib": intercept, "fit_error_gib": error}
        if count > 2:
            middle = statistics.fmean(batches)
            spread = math.sqrt((count - 2) / count * sum((batch - middle) ** 2 for batch in batches))
            half = student_quantile(0.975, count - 2) * error / spread
            summary["interval"] = [slope - half, slope + half]
    return {**summary, "peaks_gib": values}


def free_memory() -> None:
    """Give back what is no longer used, so that what comes next finds the device empty."""
    gc.collect()
    empty_caches()


def run_worker(protocol: Protocol, cell: Cell, batch: int) -> dict[str, Any]:
    order = {"protocol": protocol.to_dict(), "cell": cell.name, "batch": batch, "code": generate.code_hashes()}
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    env = {name: value for name, value in os.environ.items() if not _LAUNCHED.fullmatch(name)} | {"PYTHONPATH": path}
    command = [sys.executable, "-m", "elfatt_sd.evaluation.measure"]
    done = subprocess.run(command, input=json.dumps(order), capture_output=True, text=True, env=env)
    if done.returncode == -9:  # SIGKILL, which Windows has no name for
        return {"failed": f"out of memory at batch {batch}"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ElfattFailure(f"memory not measured at batch {batch}: {said}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


@torch.no_grad()
def measure_peak(protocol: Protocol, cell: Cell, batch: int) -> dict[str, Any]:
    """Run a row once in this process and read its peak; and where the meter cannot start again, that of loading."""
    pipe = generate.load_protocol_pipeline(protocol)
    short = dataclasses.replace(protocol, steps=(protocol.memory or PeakMemory()).steps or protocol.steps)
    meter = PeakMeter(generate.denoiser(pipe).device)
    loading = 0 if meter.restart() else meter.read() or 0
    prompts, seeds = _given(protocol, cell, batch)
    with generate.row_patch(pipe, cell, seeds[0]):
        generate.to_uint8(generate.make_images(pipe, short, prompts, seeds))
    return {"kind": meter.kind, "peak": (meter.read() or 0) / _GIB, "loading": loading / _GIB}


def _worker() -> None:
    """Read an order from stdin, measure, and print the result as the last line; or end with what went wrong."""
    order = json.load(sys.stdin)
    protocol = Protocol.from_dict(order["protocol"])
    if order["code"] != generate.code_hashes():
        sys.exit("the code of elfatt_sd was changed during the run; put it back, or give a new folder.")
    try:
        result = measure_peak(protocol, protocol.cell(order["cell"]), order["batch"])
    except Exception as error:
        if not is_out_of_memory(error):
            sys.exit(in_plain_words(error))
        result = {"failed": f"out of memory at batch {order['batch']}"}
    print(json.dumps(result))


if __name__ == "__main__":
    _worker()
