"""The device and the machine: their names, memory, clocks and load, and that nothing of it has to be told."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from elfatt_sd import devices
from elfatt_sd.devices import (
    Bystanders,
    commit_of,
    cpu_name,
    describe_machine,
    device_name,
    proc_value,
    read_clocks,
    short_commit,
    synchronize,
)
from elfatt_sd.errors import is_out_of_memory

CPU = torch.device("cpu")


def test_the_machine_has_a_name() -> None:
    assert cpu_name()
    assert "\n" not in cpu_name()
    assert device_name(CPU) == f"{os.cpu_count()} cores of {cpu_name()}"
    assert device_name(torch.device("meta")).startswith("meta of ")


def test_the_device_itself_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the current one, which may be another."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(device))
    synchronize(CPU)
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


def test_the_machine_is_described() -> None:
    here = describe_machine(CPU)
    assert here["packages"]["torch"] and here["cpu_cores"] == os.cpu_count()
    assert here["ram_gib"] > 0.1 and here["device"].endswith(here["cpu"])
    assert set(read_clocks(CPU)) == {"cpu_mhz"}


def test_what_the_system_does_not_tell_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise PermissionError("hidden")

    for name in ("cpu_times", "cpu_freq", "virtual_memory"):
        monkeypatch.setattr(devices.psutil, name, fail)
    assert describe_machine(CPU)["ram_gib"] is None
    assert read_clocks(CPU) == {"cpu_mhz": None}
    assert Bystanders().share() is None
    monkeypatch.delattr(devices.psutil, "cpu_freq")
    assert read_clocks(CPU) == {"cpu_mhz": None}


def test_processor_time_is_read() -> None:
    """No part is greater than the whole, and this process's own share grows as it works."""
    before = devices._processor_seconds()
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    after = devices._processor_seconds()
    assert before is not None and after is not None
    everything, busy, _ = after
    assert 0 < busy <= everything
    assert after[2] - before[2] >= 0.05


def test_processor_time_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds of two processors, six busy, four of them for this process: others had two of twenty."""
    readings = iter([(100.0, 50.0, 7.0), (120.0, 56.0, 11.0)])
    monkeypatch.setattr(devices, "_processor_seconds", lambda: next(readings))
    assert Bystanders().share() == pytest.approx(0.1)


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
    assert short_commit(commit_of(package)) == f"{commit[:12]}+changes" and short_commit(None) == ""


def test_clocks_are_those_of_the_device_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own number: `CUDA_VISIBLE_DEVICES` gives another card the index 0."""
    asked: list[tuple[str, ...]] = []

    def answer(*command: str) -> str:
        asked.append(command)
        return "1980, 2619, 1980, 31, 75.5"

    properties = SimpleNamespace(uuid="0f2c")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(devices, "_first_line", answer)
    assert read_clocks(torch.device("cuda", 0))["clocks.sm"] == "1980"
    assert "--id=GPU-0f2c" in asked[0]
