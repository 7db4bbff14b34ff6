"""What methods cost the host: operations are counted on tensors without values, by phase and beside tomesd."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elfatt_sd.benchmarking.conclusion import conclude
from elfatt_sd.benchmarking.host import Operations, host
from elfatt_sd.benchmarking.plots import save
from elfatt_sd.benchmarking.record import Session


@pytest.fixture(scope="module")
def operations() -> dict[str, float]:
    """More operations a layer at the shape of Stable Diffusion 1.5; nothing is allocated there."""
    rows = host(methods=["tomesd", "tome", "elfatt-fast", "elfatt-quality"], steps=8)["rows"]
    return {row["method"]: row["operations"] for row in rows}


def test_views_are_no_operations() -> None:
    x, counted = torch.empty(4, 4, device="meta"), Operations()
    with counted:
        x.t().flatten()[None].transpose(0, 1)
        torch.ones(2) + 1
    assert counted.count == 1, "what is flattened after a transposition is copied; the CPU's do not count"


def test_goals(operations: dict[str, float]) -> None:
    assert operations["elfatt-fast"] < 2.5, "one copy a call for all layers comes on top of two a layer"
    assert operations["tome"] <= operations["tomesd"] == 28
    assert operations["elfatt-quality"] < 7, "one step of four computes both"


def test_a_row_for_each_phase_that_is_not_exact(small_shapes: None, tmp_path: Path) -> None:
    results = host(sizes=[64, 128], methods=["elfatt", "elfatt-fast"], steps=5, session=Session(tmp_path))
    assert [(row["size"], row["method"], row["layers"]) for row in results["rows"]] == [
        (size, method, layers)
        for size in (64, 128)
        for method, layers in (("elfatt", 3), ("elfatt", 3), ("elfatt-fast", 7))
    ]
    _, table, plot = save(results, tmp_path / "host.json")
    lines = table.read_text().splitlines()
    assert lines[0].startswith("| pixels | method | phase | layers | operations more a layer |")
    assert len(lines) == 2 + len(results["rows"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert conclude(results)[0].startswith("Most operations: elfatt, ")
