"""Freed memory stays with the process, and only where that was asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checks import load_script

CODE = """
import resource
import torch
import elfatt_sd.evaluation.measure
from elfatt_sd import cli
from elfatt_sd.devices import keep_freed_memory, keeps_freed_memory

def faults():
    for turn in range(20):
        if turn == 16:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(1 << 24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

assert not keeps_freed_memory()
given_back = faults()
cli.app = lambda **_: None
cli.main()
assert keeps_freed_memory() and keep_freed_memory()
print(given_back, faults())
"""
PAGES = (1 << 26) // 4096  # of one such tensor


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_the_next_tensor_takes_the_pages_of_the_last_once_the_command_runs() -> None:
    """Four tensors of 64 MiB, one after the other, after 16 by which the heap has grown to what it takes.

    An import keeps nothing, nor do the processes that measure memory, which run a module and not the command.
    """
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    given_back, kept = map(int, done.stdout.split())
    assert kept < PAGES / 8
    assert given_back > PAGES / 8, "else there is nothing to gain on this machine"


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_the_script_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """A table, JSON and a plot; another round is added to those of before. A first process is a real one."""
    script = load_script("benchmarks/freed_memory.py")
    found = [script.run("toy", True)]
    assert found[0]["peak"] > 2**28
    monkeypatch.setattr(script, "run", lambda name, keeps: found[0])
    names = ["untouched", "elfatt-fast", "untouched, freed memory kept", "elfatt-fast, freed memory kept"]
    for rounds in (1, 2):
        words = ["freed_memory.py", "--models", "toy", "--rounds", str(rounds), "--out", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", words)
        script.main()
        said = capsys.readouterr().out
        results = json.loads((tmp_path / "freed_memory.json").read_text())
        assert {row["method"]: row["rounds"] for row in results["rows"]} == dict.fromkeys(names, rounds)
        assert all(f"| {name} |" in said for name in names)
        speed = results["rows"][3]["speed"]
        assert set(speed) == {"untouched", "untouched, freed memory kept", "elfatt-fast"}
    assert said.startswith("toy: 1 of 2"), "one round was there"
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".png"}
