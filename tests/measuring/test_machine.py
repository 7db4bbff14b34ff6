"""What is read of the machine, and that nothing of it is needed."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from elfatt_sd import devices as machine
from elfatt_sd.devices import Bystanders, commit_of, describe_machine, read_clocks, short_commit

CPU = torch.device("cpu")


def test_the_machine_is_described() -> None:
    here = describe_machine(CPU)
    assert here["packages"]["torch"] and here["cpu_cores"] == os.cpu_count()
    assert here["ram_gib"] > 0.1 and here["device"].endswith(here["cpu"])
    assert set(read_clocks(CPU)) == {"cpu_mhz"}


def test_what_the_system_does_not_tell_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise PermissionError("hidden")

    for name in ("cpu_times", "cpu_freq", "virtual_memory"):
        monkeypatch.setattr(machine.psutil, name, fail)
    assert describe_machine(CPU)["ram_gib"] is None
    assert read_clocks(CPU) == {"cpu_mhz": None}
    assert Bystanders().share() is None
    monkeypatch.delattr(machine.psutil, "cpu_freq")
    assert read_clocks(CPU) == {"cpu_mhz": None}


def test_processor_time_is_read() -> None:
    """No part is greater than the whole, and this process's own share grows as it works."""
    before = machine._processor_seconds()
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    after = machine._processor_seconds()
    assert before is not None and after is not None
    everything, busy, _ = after
    assert 0 < busy <= everything
    assert after[2] - before[2] >= 0.05


def test_processor_time_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds of two processors, six busy, four of them for this process: others had two of twenty."""
    readings = iter([(100.0, 50.0, 7.0), (120.0, 56.0, 11.0)])
    monkeypatch.setattr(machine, "_processor_seconds", lambda: next(readings))
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
    monkeypatch.setattr(machine, "_first_line", answer)
    assert read_clocks(torch.device("cuda", 0))["clocks.sm"] == "1980"
    assert "--id=GPU-0f2c" in asked[0]
