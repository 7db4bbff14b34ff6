"""Peak memory is that of the call, in a process that holds the model already."""

from __future__ import annotations

import sys

import pytest
import torch

from elfatt_sd.benchmarking.memory import FreshPeaks, peak_memory
from elfatt_sd.benchmarking.models import Model
from elfatt_sd.benchmarking.variants import UNTOUCHED
from elfatt_sd.config import ElfattError
from elfatt_sd.evaluation.measure import PeakMeter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what was resident")
MIB = 2**20


def test_peak_memory_is_what_the_call_needs(cpu: torch.device) -> None:
    kept = torch.ones(64 * MIB, dtype=torch.uint8)
    peak = peak_memory(lambda: torch.ones(200 * MIB, dtype=torch.uint8), cpu)
    assert peak is not None
    assert 0.9 < peak / (200 * MIB) < 1.2
    assert len(kept)


def test_a_peak_that_cannot_start_anew_is_not_measured(cpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of whatever ran before would hide the call's own."""
    monkeypatch.setattr(PeakMeter, "reset", lambda self: False)
    assert peak_memory(lambda: torch.ones(MIB), cpu) is None


def test_a_call_that_does_not_fit_has_no_peak(cpu: torch.device) -> None:
    def fail(error: Exception) -> None:
        raise error

    assert peak_memory(lambda: fail(torch.OutOfMemoryError("CUDA out of memory")), cpu) is None
    with pytest.raises(ElfattError, match="other"):
        peak_memory(lambda: fail(ElfattError("other")), cpu)


def test_fresh_processes_measure_variants(model: Model) -> None:
    """A larger batch needs more, and an error in a fork arrives here."""
    with FreshPeaks(model, torch.float32) as peaks:
        once, more = peaks.peak(UNTOUCHED, 256, 1), peaks.peak(UNTOUCHED, 256, 16)
        assert once is not None and more is not None
        tokens = 32 * 32 * 16 * 4  # bytes of one tensor of the finest level
        assert more - once > 15 * tokens
        with pytest.raises(RuntimeError, match="negative"):
            peaks.peak(UNTOUCHED, 64, -1)
