"""The scripts of benchmarks/: what methods cost the host, merging, growth with the tokens, CUDA graphs."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.checks import QUICK, check_saved
from support.commands import ROOT

from benchmarks.graphs import graphed_call
from benchmarks.growth import fit_exponent, growth, make_exponents
from benchmarks.host import Operations, host
from benchmarks.merging import merging
from elfatt_sd import benchmarking
from elfatt_sd.attention.merging import Matching
from elfatt_sd.benchmarking import Model, layer_phases
from elfatt_sd.benchmarking.report import save
from elfatt_sd.benchmarking.variants import UNTOUCHED, Variant, varied
from elfatt_sd.families import copy_structure
from elfatt_sd.runtime import call as state_module


def test_a_script_prints_its_table_and_writes_its_files(tmp_path: Path) -> None:
    options = ["--tokens", "64", "--repeats", "1", "--dtype", "float32", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.merging", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert "64 tokens, batch 2, float32:\n\n| method |" in done.stdout
    assert {path.suffix for path in tmp_path.glob("merging.*")} == {".json", ".md", ".png"}
    said = json.loads((tmp_path / "merging.json").read_text())["command"]
    assert said.startswith("python -m benchmarks.merging --to")


def test_goals_of_the_host() -> None:
    """More operations a layer at the shape of Stable Diffusion 1.5; nothing is allocated there. Views are none."""
    x, counted = torch.empty(4, 4, device="meta"), Operations()
    with counted:
        x.t().flatten()[None].transpose(0, 1)
        torch.ones(2) + 1
    assert counted.count == 1, "what is flattened after a transposition is copied; the CPU's do not count"
    rows = host(methods=["tomesd", "tome", "elfatt-fast", "elfatt-quality"], steps=8)["rows"]
    operations = {row["method"]: row["operations"] for row in rows}
    assert operations["elfatt-fast"] < 2.5, "one copy a call for all layers comes on top of two a layer"
    assert operations["tome"] <= operations["tomesd"] == 28
    assert operations["elfatt-quality"] < 7, "one step of four computes both"


def test_a_row_for_each_phase_that_is_not_exact(small_shapes: None, tmp_path: Path) -> None:
    results = host(sizes=[64], methods=["elfatt", "elfatt-fast"], steps=5)
    rows = [(row["size"], row["method"], row["layers"]) for row in results["rows"]]
    assert rows == [(64, "elfatt", 3), (64, "elfatt", 3), (64, "elfatt-fast", 7)]
    table, plot = save(results, tmp_path / "host.json")
    lines = table.read_text().splitlines()
    assert lines[0].startswith("| pixels | method | phase | layers | operations more a layer |")
    assert len(lines) == 2 + len(results["rows"]) and plot.read_bytes().startswith(b"\x89PNG")


def test_merging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unmerged: list[torch.Size] = []
    original = Matching.unmerge
    monkeypatch.setattr(Matching, "unmerge", lambda self, y: (unmerged.append(y.shape), original(self, y))[1])
    results = merging(tokens=[256], channels=32, repeats=2, device="cpu")
    assert unmerged == [(2, 128, 32)] * 2 * (1 + 2), "of both precisions a warm-up and two rounds"
    names = ("tomesd", "ours", "floor: similarities")
    found = [(row["dtype"], row["method"]) for row in results["rows"]]
    assert found == [(dtype, name) for dtype in ("float32", "bfloat16") for name in names]
    assert results["rows"][0]["speed"] == {"tomesd": {"median": 1.0, "min": 1.0, "max": 1.0}}
    check_saved(results, tmp_path)


def test_growth_and_its_exponents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each round that all sizes have; what was timed at one size has none."""
    times = {4096: [4096**2, 4096, 4096], 65536: [65536**2, 65536], 16384: [16384**2, 16384, 1.0]}
    groups = [{"key": {"part": "layer", "tokens": size}, "times": {"a": taken}} for size, taken in times.items()]
    groups[0]["times"] |= {"b": [1.0], "c": []}
    expected = {"layer": {"a": pytest.approx({"median": 1.5, "min": 1, "max": 2}), "b": None}}
    assert make_exponents(groups) == expected
    fitted = fit_exponent({count: [3e-9 * count**1.5] for count in (4096, 9216)})
    assert fitted == pytest.approx(dict.fromkeys(("median", "min", "max"), 1.5))
    monkeypatch.setattr(benchmarking, "CHANNELS", 32)
    monkeypatch.setattr(benchmarking, "HEADS", 4)
    results = growth([256, 64], block_size=16, **QUICK)
    sizes = [row["tokens"] for row in results["rows"]]
    assert sizes == sorted(sizes) and set(results["exponents"]) == {"attention", "layer"}
    for fits in results["exponents"].values():
        assert "softmax" in fits and all(math.isfinite(value["median"]) for value in fits.values())
    assert {"tomesd 0.5", *layer_phases(16)} <= set(results["exponents"]["layer"])
    check_saved(results, tmp_path)


def pretend(monkeypatch: pytest.MonkeyPatch, capturing: Any, **graph: Any) -> None:
    """There is a GPU that captures graphs."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(**graph))
    monkeypatch.setattr(torch.cuda, "graph", capturing)


@pytest.mark.parametrize(("changes", "matchings"), [({"reuse_layers": True}, 1), ({"reuse_steps": 2}, 0)], ids=str)
def test_a_graph_holds_its_own_matching(
    model: Model, changes: dict[str, Any], matchings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is captured must match anew where a call does, and must not where steps share a matching."""
    made: list[int] = []
    captured: list[int] = []
    find_candidates = state_module.find_candidates

    @contextmanager
    def capturing(graph: Any) -> Iterator[None]:
        made.clear()
        yield
        captured.append(len(made))

    monkeypatch.setattr(state_module, "find_candidates", lambda *args: (made.append(1), find_candidates(*args))[1])
    pretend(monkeypatch, capturing, replay=made.clear)
    variant = Variant("patch", varied("tome", **changes))
    call = graphed_call(variant.install(copy_structure(model.unet)), model.inputs(64, 2), variant)
    call()
    call()
    assert captured == [matchings]


def test_memory_that_runs_out_in_a_capture_is_told(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch ends the capture, which fails, too; the variant is to be left out, not the whole part."""

    @contextmanager
    def capturing(graph: Any) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    pretend(monkeypatch, capturing)
    unit = copy_structure(model.unet)
    with pytest.raises(RuntimeError, match="previous error"):
        graphed_call(unit, model.inputs(64, 2), UNTOUCHED)()

    def run_out(**_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    calls = iter([unit.forward, unit.forward, run_out])
    monkeypatch.setattr(unit, "forward", lambda *args, **options: next(calls)(*args, **options))
    with pytest.raises(torch.OutOfMemoryError):
        graphed_call(unit, model.inputs(64, 2), UNTOUCHED)()
