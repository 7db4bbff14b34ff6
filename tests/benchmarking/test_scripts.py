"""The scripts of benchmarks/: host, merging, CUDA graphs, and the suite for one GPU with its tiny models."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.checks import Recorded, counting
from support.commands import ROOT

from benchmarks import correctness, gpu_next, gpu_suite
from benchmarks.graphs import graphed_call
from benchmarks.host import host
from benchmarks.shown import write_suite
from elfatt_sd import benchmarking
from elfatt_sd.benchmarking import Model, layer_phases
from elfatt_sd.benchmarking.report import Session, save
from elfatt_sd.benchmarking.variants import Variant, resolve_methods, varied
from elfatt_sd.families import copy_structure
from elfatt_sd.families.shapes import empty_model
from elfatt_sd.runtime import call as state_module
from elfatt_sd.runtime import graphs


def test_a_script_prints_its_table_and_writes_its_files(tmp_path: Path) -> None:
    """Merging against that of tomesd, in both dtypes that a CPU has."""
    options = ["--tokens", "64", "--repeats", "1", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.merging", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert "64 tokens, batch 2:\n\n| dtype | method |" in done.stdout
    assert {path.suffix for path in tmp_path.glob("merging.*")} == {".json", ".md", ".png"}
    results = json.loads((tmp_path / "merging.json").read_text())
    assert results["command"].startswith("python -m benchmarks.merging --to")
    found = [(row["dtype"], row["method"]) for row in results["rows"]]
    names = ("tomesd", "ours", "floor: similarities")
    assert found == [(dtype, name) for dtype in ("float32", "bfloat16") for name in names]
    assert results["rows"][0]["speed"] == {"tomesd": {"median": 1.0, "min": 1.0, "max": 1.0}}


def test_goals_of_the_host(tmp_path: Path) -> None:
    """More operations a layer at the shape of Stable Diffusion 1.5; nothing is allocated there."""
    results = host(methods=["tomesd", "tome", "elfatt-fast", "elfatt-quality"], steps=8)
    rows = results["rows"]
    operations = {row["method"]: row["operations"] for row in rows}
    assert operations["elfatt-fast"] < 2.5, "one copy a call for all layers comes on top of two a layer"
    assert operations["tome"] <= operations["tomesd"] == 28
    assert operations["elfatt-quality"] < 7, "one step of four computes both"
    table, plot = save(results, tmp_path / "host.json")
    lines = table.read_text().splitlines()
    assert lines[0].startswith("| pixels | method | phase | layers | operations more a layer |")
    assert len(lines) == 2 + len(rows) and plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("changes", "matchings"), [({"reuse_layers": True}, 1), ({"reuse_steps": 2}, 0)], ids=str)
def test_graphs_match_anew(
    model: Model, changes: dict[str, Any], matchings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is captured must match anew where a call does, and must not where steps share a matching."""
    made = counting(monkeypatch, state_module, "find_candidates")
    captured: list[int] = []

    @contextmanager
    def capturing(graph: Any) -> Iterator[None]:
        made.clear()
        yield
        captured.append(len(made))

    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=made.clear))
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    variant = Variant("patch", varied("tome", **changes))
    call = graphed_call(variant.install(copy_structure(model.unet)), model.inputs(64, 2), variant)
    call()
    call()
    assert captured == [matchings]


# The suite writes after every part and needs few packages.

NOT_NEEDED = ("accelerate", "jinja2", "matplotlib", "peft", "rich", "scipy", "torchmetrics", "torchvision")
NOT_NEEDED += ("transformers", "typer")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run some parts of the suite with two of the methods, and read what it has written."""
    some = lambda names, **options: resolve_methods(("tome", "elfatt-fast"), **options)  # noqa: E731
    monkeypatch.setattr(benchmarking, "resolve_methods", some)

    def main(*parts: str) -> Any:
        monkeypatch.setattr(sys, "argv", words(tmp_path, *parts))
        gpu_suite.main()
        return read(tmp_path)

    return main


def words(folder: Path, *parts: str) -> list[str]:
    return ["gpu_suite.py", "--tiny", "--device", "cpu", "--out", str(folder), "--only", ",".join(parts)]


def read(folder: Path) -> Any:
    return json.loads((folder / "gpu_suite.json").read_text())


def test_it_writes_after_every_part(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of the ten minutes before stay; not so those of another machine."""
    written = []
    original = gpu_suite.Suite.write
    monkeypatch.setattr(gpu_suite.Suite, "write", lambda self: (original(self), written.append(read(tmp_path)))[0])
    results = run("kernels", "sd15 1024 batch 1 graph triton")
    assert [len(results["parts"]) for results in written] == [1, 2, 2]
    assert results["errors"] == {} and results["missing"].keys() <= {"flash", "_flash_3", "sage"}
    triton = results["parts"]["sd15 1024 batch 1 graph triton"]
    assert "attention_backend='triton' needs a GPU" in triton["groups"][0]["failed"]["tome/0"]
    assert "untouched" in {row["method"] for row in triton["rows"]}
    results = run("merging")
    assert len(results["parts"]) == 3
    results["parts"]["kernels"]["machine"]["device"] = "another"
    (tmp_path / "gpu_suite.json").write_text(json.dumps(results))
    with pytest.raises(SystemExit, match="holds 'kernels' of another machine"):
        run("merging")
    assert read(tmp_path) == results


@pytest.mark.usefixtures("narrow")
def test_every_kind_of_part_runs(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods are right on this CPU; growth, a transformer, another layout, compiled, a profile; one report of all."""
    monkeypatch.setattr(torch, "compile", lambda unet, dynamic: unet)
    monkeypatch.setattr(correctness, "resolve_methods", lambda _: resolve_methods(["elfatt-fast"]))
    monkeypatch.setattr(gpu_suite, "FEW", ("elfatt-fast",))
    names = ["correctness", "sd15 512 batch 1 host", "growth", "flux 1024 batch 1"]
    names += ["sd15 1024 batch 1 graph channels_last", "sd15 512 batch 1 compiled"]
    results = run(*names)
    parts = results["parts"]
    assert sorted(parts) == sorted(names) and results["errors"] == {}
    kinds = {(row["model"], row["dtype"], row["right"]) for row in parts["correctness"]["rows"]}
    assert kinds == {(model, dtype, True) for model in ("UNet", "Flux") for dtype in ("float32", "bfloat16")}
    for row in parts["sd15 512 batch 1 host"]["rows"]:
        assert 0 < row["host"] <= row["wall"]
        assert row["device"] > 0 and row["kernels"] >= len(row["longest"]) > 0
        assert any("scaled_dot_product" in name for name in row["attention"])
    methods = {name: {row["method"] for row in part["rows"]} for name, part in parts.items()}
    assert methods["flux 1024 batch 1"] >= {"untouched", "elfatt-fast"}
    assert "elfatt-fast, compiled" in methods["sd15 512 batch 1 compiled"]
    fits = parts["growth"]["exponents"]
    assert set(fits) == {"attention", "layer"} and {"tomesd 0.5", *layer_phases(16)} <= set(fits["layer"])
    assert all(math.isfinite(fit["median"]) for each in fits.values() for fit in (each["softmax"], *each.values()))
    file, table, *plots = write_suite(tmp_path / "gpu_suite.json")
    assert [file, table] == [tmp_path / "gpu_suite.json", tmp_path / "gpu_suite.md"]
    assert sorted(plots) == sorted(tmp_path / f"gpu_suite/{name.replace(' ', '-')}.png" for name in names)
    assert all(plot.read_bytes().startswith(b"\x89PNG") for plot in plots)
    assert "| UNet | elfatt-fast/1 | bfloat16 | auto |" in table.read_text()
    assert "![profile](gpu_suite/sd15-512-batch-1-host.png)" in table.read_text()


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="Windows")
@pytest.mark.parametrize("number", ["SIGTERM", "SIGALRM", None])
def test_a_suite_that_is_stopped_or_a_part_that_fails_keeps_its_rounds(
    number: str | None, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped by the system, or by its own clock, it concludes; after a failure it goes on."""
    before = {name: signal.getsignal(getattr(signal, name)) for name in ("SIGTERM", "SIGALRM")}
    original, timed, went_on = Session.time, [], []

    def time(self: Any, key: Any, *args: Any) -> None:
        if timed and number is None:
            raise RuntimeError("CUDA error")
        original(self, key, *args)
        timed.append(key)
        if number is not None:
            signal.raise_signal(getattr(signal, number))

    monkeypatch.setattr(Session, "time", time)
    monkeypatch.setattr(gpu_suite.Suite, "merging", lambda self: went_on.append(1))
    if number is None:
        run("kernels", "merging")
        said = "RuntimeError: CUDA error"
    else:
        with pytest.raises(SystemExit, match=number):
            run("kernels", "merging")
        said = f"SystemExit: stopped by {number}"
    results = read(tmp_path)
    assert results["parts"]["kernels"]["rows"] and len(results["parts"]["kernels"]["groups"]) == 1
    assert results["errors"]["kernels"] == said and {"goals", "memory_slope"} <= set(results)
    assert bool(went_on) == (number is None)
    assert {name: signal.getsignal(getattr(signal, name)) for name in before} == before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_what_is_wrong_on_a_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A patched layer that is a little off, one that raises, and one that gives NaN."""
    cpu, found = torch.device("cpu"), correctness._output
    model = Model(benchmarking.fill(empty_model(gpu_suite.TINY), cpu, torch.float32), 8)

    def output(own: Any, variant: Any, size: int) -> torch.Tensor:
        made = found(own, variant, size)
        if own is model or variant.kind == "untouched":
            return made
        if variant.config.method == "agent":
            raise RuntimeError("an illegal\ninstruction")
        return made * (torch.nan if variant.config.method == "elfatt" else 1.01)

    monkeypatch.setattr(correctness, "_output", output)
    options: Any = {"size": 64, "device": cpu, "dtypes": [torch.float32], "methods": ["tome", "agent", "elfatt"]}
    rows = correctness.correctness({"UNet": model}, **options)["rows"]
    assert {row["method"].split("/")[0]: (row["right"], row["failed"]) for row in rows} == {
        "untouched": (True, None),
        "tome": (False, None),
        "agent": (False, "RuntimeError: an illegal instruction"),
        "elfatt": (False, "not finite"),
    }


def test_it_needs_torch_diffusers_and_tomesd_only(tmp_path: Path) -> None:
    """Two parts run without what only our other commands need; a size that one part alone has gets its slope."""
    parts = ["merging", "sdxl 512 batch 48"]
    code = (
        "import runpy, sys\n"
        f"sys.modules.update(dict.fromkeys({NOT_NEEDED!r}))\n"  # None there makes an import fail
        f"sys.argv = {words(tmp_path, *parts)!r}\n"
        f"runpy.run_path({str(ROOT / 'benchmarks' / 'gpu_suite.py')!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    results = read(tmp_path)
    assert results["errors"] == {} and list(results["parts"]) == parts
    slopes = results["memory_slope"]["sdxl 512"]
    assert {"untouched", "tomesd", "tome", "elfatt-fast"} <= set(slopes) and all(each > 0 for each in slopes.values())
    assert results["peaks"]["sdxl 512 batch 48"]["share"] > 0.5


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="Windows")
@pytest.mark.usefixtures("narrow")
def test_the_next_minutes_on_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts run in their order and write; one that fails or has had its time is told with its traceback."""
    names = ["layouts", "shallow", "attentions", "flux", "graphs"]
    own = ["--tiny", "--device", "cpu", "--seconds", "400", "--only", ",".join(["tune", "tests", *names])]
    monkeypatch.setattr(sys, "argv", ["gpu_next.py", "--out", str(tmp_path), *own])
    monkeypatch.setitem(graphs.CAPTURES, "cpu", Recorded)
    monkeypatch.setattr(gpu_next.Next, "tune", lambda self: 1 / 0)
    monkeypatch.setattr(gpu_next.Next, "tests", lambda self: time.sleep(60))
    monkeypatch.setattr(gpu_next, "TESTS", 0.5)
    gpu_next.main()
    results = json.loads((tmp_path / "gpu_next.json").read_text())
    assert {name: error.split(":")[0] for name, error in results["errors"].items()} == {
        "tune": "ZeroDivisionError",
        "tests": "TimeoutError",
    }
    assert "1 / 0" in results["tracebacks"]["tune"] and "time.sleep" in results["tracebacks"]["tests"]
    assert sorted(results["parts"]) == sorted(names) and results["seconds"]["all"] > 0
    rows = {name: {row["method"] for row in part["rows"]} for name, part in results["parts"].items()}
    assert {f"{method}, {layout}" for method in ("untouched", "elfatt-fast") for layout in gpu_next.LAYOUTS} <= rows[
        "layouts"
    ]
    assert {"untouched, compiled", "elfatt-fast, blocks compiled", "untouched, NCHW, eager"} <= rows["layouts"]
    assert {"default", "sampled, native", "cell_spread, native"} <= rows["attentions"]
    assert rows["shallow"] == {"whole", "shallow"} and "elfatt-fast" in rows["flux"]
    drawn = results["parts"]["graphs"]["rows"]
    assert {row.get("equal") for row in drawn if not row["layout"]} == {True}, [row.get("failed") for row in drawn]
    assert all(row["greatest difference"] < 0.1 and len(row["said"]) < 2 for row in drawn)
