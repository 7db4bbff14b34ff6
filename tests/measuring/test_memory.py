"""Peak memory is that of the call or of the process, and None where a system does not tell."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from elfatt_sd import measure as memory
from elfatt_sd.errors import ElfattError
from elfatt_sd.measure import PeakMeter, peak_memory, process_peak

MIB = 2**20
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture
def cpu() -> torch.device:
    return torch.device("cpu")


def test_peak_memory_is_what_the_call_needs(cpu: torch.device) -> None:
    """Two tensors at the highest point; what was there before does not count, nor what comes after it."""
    kept = torch.ones(64 * MIB, dtype=torch.uint8)

    def call() -> None:
        first = torch.ones(20 * MIB, dtype=torch.uint8)
        second = first + kept[: 20 * MIB]
        del first
        second[:MIB] + 1

    peak = peak_memory(call, cpu)
    assert peak is not None
    assert 40 * MIB <= peak < 40 * MIB + 4096
    assert peak_memory(call, cpu) == peak


def test_a_call_without_tensors_needs_nothing(cpu: torch.device) -> None:
    assert peak_memory(lambda: None, cpu) == 0


def test_a_device_that_does_not_tell() -> None:
    assert peak_memory(lambda: None, torch.device("meta")) is None


def test_a_call_that_does_not_fit_has_no_peak(cpu: torch.device) -> None:
    def fail(error: Exception) -> None:
        raise error

    assert peak_memory(lambda: fail(torch.OutOfMemoryError("CUDA out of memory")), cpu) is None
    with pytest.raises(ElfattError, match="other"):
        peak_memory(lambda: fail(ElfattError("other")), cpu)


def test_the_high_water_mark_counts_what_was_held() -> None:
    before = process_peak()
    if before is None:
        pytest.skip("this system does not tell")
    size = before + 2**26
    block = bytearray(size)
    block[::4096] = b"1" * len(range(0, size, 4096))
    after = process_peak()
    assert after is not None
    assert after > size


@pytest.mark.parametrize("device", DEVICES)
def test_the_meter_sees_an_allocation_and_starts_anew(device: str) -> None:
    meter = PeakMeter(torch.device(device))
    before = meter.read() if meter.restart() else None
    if before is None:
        pytest.skip("the peak cannot start anew here")
    block = torch.ones(2**26, device=device)  # 256 MiB
    del block
    assert meter.kind and (meter.read() or 0) > before + 200 * MIB
    meter.restart()
    assert (meter.read() or 0) < before + 100 * MIB


def no_proc(file: str, key: str) -> None:
    """A system without `/proc`."""


def test_windows_tells_the_peak_working_set(monkeypatch: pytest.MonkeyPatch) -> None:
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=1, peak_wset=7))
    monkeypatch.setattr(memory, "proc_value", no_proc)
    monkeypatch.setattr(memory.sys, "platform", "win32")
    monkeypatch.setattr(memory.psutil, "Process", lambda: process)
    meter = PeakMeter(torch.device("cpu"))
    assert (meter.kind, meter.read(), meter.read_reserved()) == ("peak working set", 7, None)


def test_macos_tells_the_maximum_resident_set(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(getrusage=lambda who: SimpleNamespace(ru_maxrss=9), RUSAGE_SELF=0)
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    monkeypatch.setitem(sys.modules, "resource", usage)
    meter = PeakMeter(torch.device("cpu"))
    assert (meter.kind, meter.read()) == ("maximum resident set", 9)
    monkeypatch.setitem(sys.modules, "resource", None)
    assert PeakMeter(torch.device("cpu")).read() is None


def test_where_no_system_tells_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "proc_value", no_proc)
    monkeypatch.setattr(memory.sys, "platform", "other")
    meter = PeakMeter(torch.device("cpu"))
    assert (meter.kind, meter.read()) == (None, None)
    monkeypatch.setattr(memory, "synchronize", lambda device: None)
    assert PeakMeter(torch.device("mps")).kind is PeakMeter(torch.device("mps")).read() is None
