"""What `elfatt_sd.keep_freed_memory` gains on a CPU: `python benchmarks/freed_memory.py`.

UNet calls, untouched and in the phase of `elfatt-fast`, in processes without it and with it, in turn. A Markdown table:
how many times as fast both become, how many times as fast as untouched `elfatt-fast` is without it and with it, and
what each process had resident at most.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

import torch

from elfatt_sd.allocation import keep_freed_memory
from elfatt_sd.benchmarking.models import copy_structure, make_model, unet_call
from elfatt_sd.benchmarking.variants import UNTOUCHED, Variant, single_phases
from elfatt_sd.config import PatchConfig
from elfatt_sd.console import quiet_libraries
from elfatt_sd.devices import device_name
from elfatt_sd.evaluation.environment import read_high_water_mark

MODELS = {"toy": (256, torch.float32), "sd15": (512, torch.bfloat16)}
CALLS = 3
GIB = 2**30


def measure(name: str, keeps: bool) -> dict[str, float]:
    """Return the median seconds of a call of each variant, and the peak of this process in bytes."""
    if keeps and not keep_freed_memory():
        raise SystemExit("freed memory cannot be kept here: the C library is not glibc")
    quiet_libraries()
    size, dtype = MODELS[name]
    model = make_model(name, torch.device("cpu"), dtype)
    fast = next(variant for variant, _ in single_phases(PatchConfig.preset("elfatt-fast")) if variant != UNTOUCHED)
    found: dict[str, float] = {}
    for label, variant in (("untouched", Variant("untouched")), ("elfatt-fast", fast)):
        call = unet_call(variant.install(copy_structure(model.unet)), model.inputs(size, 2))
        times = []
        for _ in range(CALLS + 1):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        found[label] = statistics.median(times[1:])
    return {**found, "peak": float(read_high_water_mark() or 0)}


def compare(name: str, rounds: int) -> None:
    """Run both kinds of process in turn and print a line for each variant."""
    turns: list[tuple[dict[str, float], ...]] = []
    for _ in range(rounds):
        turns.append(tuple(run(name, keeps) for keeps in (False, True)))
    gains = {key: [plain[key] / kept[key] for plain, kept in turns] for key in ("untouched", "elfatt-fast")}
    speeds = [[turn[side]["untouched"] / turn[side]["elfatt-fast"] for turn in turns] for side in (0, 1)]
    peaks = [f"{statistics.median(turn[side]['peak'] for turn in turns) / GIB:.2f}" for side in (0, 1)]
    cells = [f"{name}, {MODELS[name][0]} pixels", *map(spread, (*gains.values(), *speeds)), " / ".join(peaks)]
    print(f"| {' | '.join(cells)} |", flush=True)


def run(name: str, keeps: bool) -> dict[str, float]:
    """Measure in a process of its own."""
    command = [sys.executable, __file__, "--child", name, *(["--keep"] if keeps else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return {key: float(value) for key, value in json.loads(done.stdout.splitlines()[-1]).items()}


def spread(values: list[float]) -> str:
    """Write the median, and the least and greatest value."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--keep", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        print(json.dumps(measure(chosen.child, chosen.keep)))
        return
    print(f"{device_name(torch.device('cpu'))}, {torch.get_num_threads()} threads, torch {torch.__version__}, ", end="")
    print(f"medians of {chosen.rounds} rounds, in brackets the least and greatest\n")
    titles = ("untouched: gain", "`elfatt-fast`: gain", "`elfatt-fast` to untouched, without", "with")
    print(f"| | {' | '.join(titles)} | peak of the process, GiB, without / with |\n|{'---|' * 6}")
    for name in chosen.models:
        compare(name, chosen.rounds)


if __name__ == "__main__":
    main()
