"""The device and the machine: names, clocks and load; freed memory that stays where that was asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from elfatt_sd import devices
from elfatt_sd.devices import commit_of, cpu_name, describe_machine, device_name, memory_of, proc_value, synchronize

CPU = torch.device("cpu")


def test_the_machine_is_described(tmp_path: Path) -> None:
    assert device_name(CPU) == f"{os.cpu_count()} cores of {cpu_name()}" and "\n" not in cpu_name()
    assert device_name(torch.device("meta")).startswith("meta of ")
    here = describe_machine(CPU)
    assert here["packages"]["torch"] and here["cpu_cores"] == os.cpu_count()
    assert here["ram_gib"] > 0.1 and here["device"].endswith(here["cpu"])
    total, free = memory_of(CPU)
    assert 0 < free <= total
    (tmp_path / "info").write_text("model\t: 1\nmodel name\t: Chip: 3 GHz\nmodel name\t: Other\n")
    assert proc_value(str(tmp_path / "info"), "model name") == "Chip: 3 GHz" and proc_value("no file", "x") is None


CODE = """
import resource
import torch
from elfatt_sd import cli, devices
from elfatt_sd.cli.console import quiet_libraries

def faults():
    for turn in range(20):
        if turn == 16:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(1 << 24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

assert not devices._kept
given_back = faults()
cli.app = lambda **_: quiet_libraries()
cli.main()
assert devices._kept and devices.keep_freed_memory()
print(given_back, faults())
"""
PAGES = (1 << 26) // 4096  # of one such tensor


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_the_next_tensor_takes_the_pages_of_the_last_once_the_command_runs() -> None:
    """Four tensors of 64 MiB, after 16 by which the heap has grown to what it takes; an import keeps nothing."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    given_back, kept = map(int, done.stdout.split())
    assert kept < PAGES / 8
    assert given_back > PAGES / 8, "else there is nothing to gain on this machine"


def test_what_is_asked_of_the_device_is_asked_of_the_one_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own number, as `CUDA_VISIBLE_DEVICES` gives another card the index 0; and what others took of the CPU."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    for device in (CPU, torch.device("cuda:1")):
        synchronize(device)
    assert waited == [torch.device("cuda:1")]
    readings = iter([1.0, 30.0])
    monkeypatch.setattr(devices.psutil, "cpu_percent", lambda: next(readings))
    monkeypatch.setattr(devices.psutil, "cpu_count", lambda: 2)
    monkeypatch.setattr(devices.psutil.Process, "cpu_percent", lambda _: 40.0)
    assert devices.Bystanders().share() == pytest.approx(0.1)


def test_the_commit_is_that_of_tracked_files(tmp_path: Path) -> None:
    def git(*command: str) -> str:
        options = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", *options, *command], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    package, installed = tmp_path / "package", tmp_path / "site-packages" / "package"
    for folder in (package, installed):
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("one = 1\n")
    assert commit_of(package) is None
    git("init", "--quiet")
    git("add", "package")
    git("commit", "--quiet", "--message", "one")
    commit = git("rev-parse", "HEAD")
    assert commit_of(package) == commit  # although the repository has other changes
    assert commit_of(installed) is None  # although it lies in the repository
    (package / "__init__.py").write_text("one = 2\n")
    assert commit_of(package) == f"{commit}+changes"
