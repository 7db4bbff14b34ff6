"""Freed memory stays with the process, and only where that was asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import resource, sys
import torch
from elfatt_sd.allocation import keep_freed_memory, keeps_freed_memory

assert not keeps_freed_memory()
if sys.argv[1] == "keep":
    assert keep_freed_memory() and keep_freed_memory() and keeps_freed_memory()
for turn in range(20):
    if turn == 16:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = (1 << 26) // 4096  # of one such tensor


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", CODE, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_the_next_tensor_takes_the_pages_of_the_last() -> None:
    """Four tensors of 64 MiB, one after the other, after 16 by which the heap has grown to what it takes."""
    assert faults("keep") < PAGES / 8
    assert faults("give back") > PAGES / 8, "else there is nothing to gain on this machine"


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_the_command_keeps_memory_and_an_import_does_not() -> None:
    """Nor do the processes that measure memory, which run a module and not the command."""
    code = """
import elfatt_sd.evaluation.measure
from elfatt_sd import cli
from elfatt_sd.allocation import keeps_freed_memory

assert not keeps_freed_memory()
cli.app = lambda **_: None
cli.main()
assert keeps_freed_memory()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_the_script_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """A table, JSON and a plot; another round is added to those of before."""
    script = Path(__file__).parents[1] / "benchmarks" / "freed_memory.py"
    names = ["untouched", "elfatt-fast", "untouched, freed memory kept", "elfatt-fast, freed memory kept"]
    for rounds in (1, 2):
        words = [sys.executable, str(script), "--models", "toy", "--rounds", str(rounds), "--out", str(tmp_path)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        results = json.loads((tmp_path / "freed_memory.json").read_text())
        assert {row["method"]: row["rounds"] for row in results["rows"]} == dict.fromkeys(names, rounds)
        assert all(f"| {name} |" in done.stdout for name in names)
        assert all(row["peak_bytes"] > 2**28 for row in results["rows"])
        speed = results["rows"][3]["speed"]
        assert set(speed) == {"untouched", "untouched, freed memory kept", "elfatt-fast"}
    assert done.stdout.startswith("toy: 1 of 2"), "one round was there"
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".png"}
