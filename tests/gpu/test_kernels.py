"""Triton's kernels, in its interpreter, against the pure functions and through whole pipelines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import elfatt_sd
from elfatt_sd.attention import triton as kernels
from elfatt_sd.errors import ElfattError

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(sys.platform != "linux", reason="Triton is there for Linux")


@pytest.fixture(scope="module")
def differences() -> dict[str, float]:
    """Triton is told of its interpreter before it is imported: a process of its own."""
    pytest.importorskip("triton")
    places = os.pathsep.join(str(HERE.parents[up]) for up in (0, 1))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": places}
    command = [sys.executable, "-W", "ignore", str(HERE / "interpreted.py")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return dict(json.loads(run.stdout))


@needs_triton
def test_kernels_are_the_pure_functions(differences: dict[str, float]) -> None:
    assert len(differences) > 25
    limits = {name: 1e-4 if name.startswith("pipeline") else 1e-5 for name in differences}  # of a layer; of a whole run
    assert {name for name, difference in differences.items() if not difference < limits[name]} == set()


@needs_triton
def test_they_are_reached_through_pipelines(differences: dict[str, float]) -> None:
    """A UNet, merged tokens, and a transformer with text: what the backend gives is what the pure functions give."""
    assert {name.partition(":")[0] for name in differences if name.startswith("pipeline")} == {
        "pipeline sampled",
        "pipeline cell_spread",
        "pipeline tome",
        "pipeline flux",
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_one_line(pipe: Any) -> None:
    with pytest.raises(ElfattError, match="attention_backend='triton' needs") as caught:
        elfatt_sd.apply_patch(pipe, "elfatt-fast", attention_backend="triton")
    assert "\n" not in str(caught.value)
    assert not elfatt_sd.is_patched(pipe)


def test_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1)
    assert not kernels.take("triton", x), "it is on the CPU"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels.take("triton", x)
    assert not kernels.take("native", x)
    assert not kernels.take("triton", x, x.double())
    assert not kernels.take("triton", x.requires_grad_())
    with torch.no_grad():
        assert kernels.take("triton", x)
