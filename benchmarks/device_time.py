"""The time of a call on the host and on the device, and the kernels that ran."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

from benchmarks import common
from elfatt_sd.benchmarking import Model, unet_call, units_of
from elfatt_sd.benchmarking.report import Results, Session
from elfatt_sd.benchmarking.variants import FLOOR, line_up, resolve_methods
from elfatt_sd.config import PatchConfig
from elfatt_sd.devices import synchronize
from elfatt_sd.measure import Call
from elfatt_sd.phases import Backend

CALLS = 5  # that are timed
LONGEST = 8  # kernels that are listed
_ATTENTION = re.compile(r"attention|attn|flash|fmha|sdpa|sage|_sampled", re.IGNORECASE)


def profile(
    model: Model,
    *,
    size: int,
    batch: int,
    device: torch.device,
    methods: Iterable[str | PatchConfig] | None = None,
    competitors: Sequence[Backend] = (),
    session: Session | None = None,
) -> Results:
    """Profile a call of every phase of every method.

    Args:
        model: whose calls.
        size: of the images in pixels.
        batch: rows of the denoiser's batch.
        device: of the model.
        methods: as for `resolve_methods`.
        competitors: backends of exact attention that are rows of their own.
        session: where the results go; it keeps going where a variant fails.

    Returns:
        Machine, settings, and a row for each variant: `host` (seconds until the call returns), `wall` (until the device
        is done), `device` (the sum of its kernels), the number of `kernels`, those that attend, and the `longest`.
    """
    own: dict[str, Any] = {"named": methods is not None, "competitors": competitors}
    lineup = line_up(resolve_methods(methods), model.unet, by_phase=True, **own)
    key = {"size": size, "batch": batch}
    dtype = str(next(model.unet.parameters()).dtype).removeprefix("torch.")
    record = (session or Session()).begin(
        "profile", device, {**key, "dtype": dtype, "variants": lineup.described()}, bases=[]
    )
    units = units_of(model, lineup.variants, lambda name, error: record.lose(key, name, error))
    rows: list[dict[str, Any]] = []
    for name, unit in units.items():
        if lineup.variants[name].kind == FLOOR:
            continue
        try:
            rows.append({"method": name, **_profiled(unet_call(unit, model.inputs(size, batch)), device)})
        except Exception as error:
            record.lose(key, name, error)
        common.keep_rows(record, key, rows)
    return record.results


def _profiled(call: Call, device: torch.device) -> dict[str, Any]:
    call()
    times = [_host_and_wall(call, device) for _ in range(CALLS)]
    kernels = _kernels(call, device)
    longest = sorted(kernels.items(), key=lambda kernel: -kernel[1][0])[:LONGEST]
    return {
        "host": statistics.median(host for host, _ in times),
        "wall": statistics.median(wall for _, wall in times),
        "device": sum(seconds for seconds, _ in kernels.values()),
        "kernels": sum(count for _, count in kernels.values()),
        "attention": sorted(name for name in kernels if _ATTENTION.search(name)),
        "longest": [[name, seconds, count] for name, (seconds, count) in longest],
    }


def _host_and_wall(call: Call, device: torch.device) -> tuple[float, float]:
    synchronize(device)
    start = time.perf_counter()
    call()
    returned = time.perf_counter()
    synchronize(device)
    return returned - start, time.perf_counter() - start


def _kernels(call: Call, device: torch.device) -> dict[str, tuple[float, int]]:
    """Return the seconds and the number of calls of each kernel; on a CPU, of each operation."""
    kind = device.type.upper()
    activities = {ProfilerActivity.CPU, getattr(ProfilerActivity, kind, ProfilerActivity.CPU)}
    with profiler(activities=sorted(activities, key=str)) as found:
        call()
        synchronize(device)
    total = "self_cpu_time_total" if device.type == "cpu" else "self_device_time_total"
    own = [event for event in found.key_averages() if str(event.device_type).rpartition(".")[2] == kind]
    return {event.key: (getattr(event, total) / 1e6, int(event.count)) for event in own if getattr(event, total) > 0}
