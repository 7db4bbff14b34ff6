"""The device's name and its memory, and freed memory that stays where that was asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import load_script

from elfatt_sd.devices import cpu_name, device_name, proc_value, synchronize
from elfatt_sd.errors import is_out_of_memory


def test_the_machine_has_a_name() -> None:
    assert cpu_name()
    assert "\n" not in cpu_name()
    assert device_name(torch.device("cpu")) == f"{os.cpu_count()} cores of {cpu_name()}"
    assert device_name(torch.device("meta")).startswith("meta of ")


def test_the_device_itself_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the current one, which may be another."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(device))
    synchronize(torch.device("cpu"))
    assert waited == []
    synchronize(torch.device("cuda:1"))
    assert waited == [torch.device("cuda:1")]


def test_first_value_of_a_key(tmp_path: Path) -> None:
    (tmp_path / "info").write_text("model\t: 1\nmodel name\t: Chip: 3 GHz\nmodel name\t: Other\n")
    assert proc_value(str(tmp_path / "info"), "model name") == "Chip: 3 GHz"
    assert proc_value(str(tmp_path / "info"), "cache") is None
    assert proc_value(str(tmp_path / "absent"), "model name") is None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("MPS backend out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"), False),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
    ],
    ids=str,
)
def test_memory_that_ran_out(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


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
