"""The device's name and its memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

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
