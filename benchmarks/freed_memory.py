"""What `elfatt_sd.keep_freed_memory` gains on a CPU: `python benchmarks/freed_memory.py --out benchmarks/results`.

UNet calls, untouched and in the phase of `elfatt-fast`, in fresh processes without it and with it, in turn: how many
times as fast both become, how many times as fast as untouched `elfatt-fast` is without it and with it, and what each
process, which makes both calls, had resident at most.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import torch

from elfatt_sd.benchmarking import make_model, unet_call
from elfatt_sd.benchmarking.report import Session, markdown
from elfatt_sd.benchmarking.variants import KEPT, UNTOUCHED, Variant, single_phases
from elfatt_sd.cli.console import quiet_libraries
from elfatt_sd.config import PatchConfig
from elfatt_sd.devices import keep_freed_memory
from elfatt_sd.families import copy_structure
from elfatt_sd.measure import now, process_peak, timed

MODELS = {"toy": (256, torch.float32), "sd15": (512, torch.bfloat16)}
FAST = "elfatt-fast"
CALLS, BATCH = 3, 2


def measure(name: str, keeps: bool) -> dict[str, float]:
    """Return the median seconds of a call of each variant, and the peak of this process in bytes."""
    if keeps and not keep_freed_memory():
        raise SystemExit("freed memory cannot be kept here: the C library is not glibc")
    quiet_libraries()
    size, dtype = MODELS[name]
    model = make_model(name, torch.device("cpu"), dtype)
    fast = next(variant for variant, _ in single_phases(PatchConfig.preset(FAST)) if variant != UNTOUCHED)
    found: dict[str, float] = {}
    for label, variant in ((UNTOUCHED.kind, Variant(UNTOUCHED.kind)), (FAST, fast)):
        call = unet_call(variant.install(copy_structure(model.unet)), model.inputs(size, BATCH))
        times = [timed(call, torch.device("cpu")) for _ in range(CALLS + 1)]
        found[label] = statistics.median(times[1:])
    return {**found, "peak": float(process_peak() or 0)}


def compare(record: Session, name: str, rounds: int) -> None:
    """Run both kinds of process in turn, each time starting with the other one, and keep every round."""
    group = record.group({"size": MODELS[name][0], "batch": BATCH, "part": name})
    times, peaks = group["times"], group["peaks"]
    started = now()
    for turn in range(rounds):
        record.progress(name, turn, rounds)
        both = {ending: run(name, ending == KEPT) for ending in (("", KEPT), (KEPT, ""))[turn % 2]}
        for ending, found in both.items():
            for label in (UNTOUCHED.kind, FAST):
                times.setdefault(label + ending, []).append(found[label])
                known = peaks.setdefault(label + ending, {str(BATCH): 0})
                known[str(BATCH)] = max(known[str(BATCH)], round(found["peak"]))
        group["sittings"] = [{"started": started, "rounds": turn + 1, "bystanders": None}]
        record.work_out()


def run(name: str, keeps: bool) -> dict[str, float]:
    """Measure in a process of its own."""
    command = [sys.executable, __file__, "--child", name, *(["--keep"] if keeps else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return {key: float(value) for key, value in json.loads(done.stdout.splitlines()[-1]).items()}


def tell(name: str, done: int, total: int) -> None:
    """Print how far a comparison is."""
    print(f"{name}: {done} of {total}")


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder for JSON, a Markdown table and a plot")
    parser.add_argument("--child", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--keep", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        print(json.dumps(measure(chosen.child, chosen.keep)))
        return
    words = shlex.join(["python", "benchmarks/freed_memory.py", *sys.argv[1:]])
    session = Session(chosen.out, command=words, progress=tell)
    dtypes = ", ".join(str(MODELS[name][1]).removeprefix("torch.") for name in chosen.models)
    bases = [UNTOUCHED.kind, UNTOUCHED.kind + KEPT, FAST]
    record = session.begin("freed_memory", torch.device("cpu"), {"dtype": dtypes}, bases=bases)
    for name in chosen.models:
        compare(record, name, chosen.rounds)
    print(markdown(record.results))
    session.write()


if __name__ == "__main__":
    main()
