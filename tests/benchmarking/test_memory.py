"""Peak memory is that of the call, in a process that holds the model already."""

from __future__ import annotations

import sys

import pytest
import torch

from elfatt_sd.benchmarking.memory import FreshPeaks, peak_memory
from elfatt_sd.benchmarking.models import Model
from elfatt_sd.benchmarking.variants import UNTOUCHED

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what was resident")
MIB = 2**20


def test_peak_memory_is_what_the_call_needs(cpu: torch.device) -> None:
    kept = torch.ones(64 * MIB, dtype=torch.uint8)
    peak = peak_memory(lambda: torch.ones(200 * MIB, dtype=torch.uint8), cpu)
    assert peak is not None
    assert 0.9 < peak / (200 * MIB) < 1.2
    assert len(kept)


def test_fresh_processes_measure_variants(model: Model) -> None:
    """A larger batch needs more, and an error in a fork arrives here."""
    with FreshPeaks(model, torch.float32) as peaks:
        once, more = peaks.peak(UNTOUCHED, 256, 1), peaks.peak(UNTOUCHED, 256, 16)
        assert once is not None and more is not None
        tokens = 32 * 32 * 16 * 4  # bytes of one tensor of the finest level
        assert more - once > 15 * tokens
        with pytest.raises(RuntimeError, match="negative"):
            peaks.peak(UNTOUCHED, 64, -1)
