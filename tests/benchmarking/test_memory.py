"""Peak memory is that of the call, counted by PyTorch."""

from __future__ import annotations

import pytest
import torch

from elfatt_sd.benchmarking.memory import peak_memory
from elfatt_sd.config import ElfattError

MIB = 2**20


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
