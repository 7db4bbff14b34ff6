"""The suite for one GPU, tried with its tiny models: it writes after every part and needs few packages."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checks import load_script
from support.commands import ROOT

from benchmarks import correctness
from benchmarks.goals import all_goals, memory_slopes
from benchmarks.shown import write_suite
from elfatt_sd import benchmarking
from elfatt_sd.benchmarking.variants import resolve_methods

NOT_NEEDED = ("accelerate", "jinja2", "matplotlib", "peft", "rich", "scipy", "torchmetrics", "torchvision")
NOT_NEEDED += ("transformers", "typer")


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, of whose methods two are left."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(
        benchmarking, "resolve_methods", lambda names, **options: resolve_methods(("tome", "elfatt-fast"), **options)
    )
    return load_script("benchmarks/gpu_suite.py")


def words(folder: Path, *parts: str) -> list[str]:
    return ["gpu_suite.py", "--tiny", "--device", "cpu", "--out", str(folder), "--only", ",".join(parts)]


def read(folder: Path) -> Any:
    return json.loads((folder / "gpu_suite.json").read_text())


@pytest.fixture
def run(suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run some of its parts, and read what it has written."""

    def main(*parts: str) -> Any:
        monkeypatch.setattr(sys, "argv", words(tmp_path, *parts))
        suite.main()
        return read(tmp_path)

    return main


def test_it_writes_after_every_part(suite: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of the ten minutes before stay; not so those of another machine."""
    written = []
    original = suite.Suite.write
    monkeypatch.setattr(suite.Suite, "write", lambda self: (original(self), written.append(read(tmp_path)))[0])
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
    made = suite.Suite(
        type("Options", (), {"tiny": True, "device": "cpu", "out": Path("x"), "only": None, "seconds": 1})
    )
    names = list(made.parts)
    assert names[:2] == ["correctness", "sd15 512 batch 1 graph"] and not made.parts.keys() & made.extra.keys()
    kinds = ("768", "triton", "host", "kernels", "flux", "sd3.5-medium", "qwen-image", "channels_last", "sdxl")
    assert [kind for kind in kinds if not any(kind in name for name in names)] == []


def test_every_kind_of_part_runs(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Growth, a transformer, another layout, a large batch, compiled; a size that one part alone has gets its slope."""
    monkeypatch.setattr(benchmarking, "CHANNELS", 32)
    monkeypatch.setattr(benchmarking, "HEADS", 4)
    monkeypatch.setattr(torch, "compile", lambda unet, dynamic: unet)
    parts = ["growth", "flux 1024 batch 1", "sd15 1024 batch 1 graph channels_last", "sdxl 512 batch 48"]
    results = run(*parts, "sd15 512 batch 1 compiled")
    methods = {name: [row["method"] for row in part["rows"]] for name, part in results["parts"].items()}
    assert list(methods) == [*parts, "sd15 512 batch 1 compiled"] and results["errors"] == {}
    assert {*methods["flux 1024 batch 1"]} >= {"untouched", "elfatt-fast"}
    assert set(results["parts"]["growth"]["exponents"]) == {"attention", "layer"}
    own = ["untouched", "tomesd", "tome", "elfatt-fast"]
    assert methods["sdxl 512 batch 48"] == [*own, "floor", "floor of 2 levels"]
    assert "elfatt-fast, compiled" in methods["sd15 512 batch 1 compiled"]
    slopes = results["memory_slope"]["sdxl 512"]
    assert {*own} <= set(slopes) and all(slope > 0 for slope in slopes.values())
    assert results["peaks"]["sdxl 512 batch 48"]["share"] > 0.5


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="Windows")
@pytest.mark.parametrize("number", ["SIGTERM", "SIGALRM", None])
def test_a_suite_that_is_stopped_or_a_part_that_fails_keeps_its_rounds(
    number: str | None, suite: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped by the system, or by its own clock, it concludes; after a failure it goes on."""
    before = {name: signal.getsignal(getattr(signal, name)) for name in ("SIGTERM", "SIGALRM")}
    original, timed, went_on = suite.Record.time, [], []

    def time(self: Any, key: Any, *args: Any) -> None:
        if timed and number is None:
            raise RuntimeError("CUDA error")
        original(self, key, *args)
        timed.append(key)
        if number is not None:
            signal.raise_signal(getattr(signal, number))

    monkeypatch.setattr(suite.Record, "time", time)
    monkeypatch.setattr(suite.Suite, "merging", lambda self: went_on.append(1))
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


def row(method: str, times: float, floor: str | None = None, own: float | None = None) -> dict[str, Any]:
    speed = {"untouched": {"median": times}}
    made = {"method": method, "rounds": 7, "speed": speed, "floor": floor and {"name": floor}}
    parts = [("untouched", 1.0), (f"{method}/1", own or 1.0)]
    measured = [
        {"variant": name, "seconds": 1 / each, "speed": {"untouched": {"median": each}}} for name, each in parts
    ]
    return made | {"parts": measured} if own else made


@pytest.mark.parametrize(
    ("part", "rows", "goals"),
    [
        # Of the floor's gain at 768 pixels and above, in the method's own phase; here the floor is twice as fast.
        ("sd15 1024 batch 1", [row("floor", 2.0), row("elfatt-fast", 1.5, "floor", 2.0)], {"elfatt-fast": (1.0, True)}),
        ("sd15 1024 batch 1", [row("floor", 2.0), row("elfatt-fast", 1.5, "floor", 1.7)],
         {"elfatt-fast": (0.7, False)}),
        ("sd15 1024 batch 1", [row("floor", 1.01), row("elfatt-fast", 1.5, "floor", 2.0)], {}),
        # With graphs at 512 pixels none may be slower than untouched.
        ("sd15 512 batch 1 graph", [row("tome", 0.8), row("elfatt-fast", 1.6)],
         {"tome": (0.8, False), "elfatt-fast": (1.6, True)}),
        ("sd15 512 batch 1", [row("tome", 0.8)], {}),
    ],
)  # fmt: skip
def test_goals(part: str, rows: list[dict[str, Any]], goals: dict[str, tuple[float, bool]]) -> None:
    found = all_goals({part: {"rows": [row("untouched", 1.0), *rows]}})
    assert {goal["method"]: (pytest.approx(goal["gain"]), goal["gain"] >= goal["goal"]) for goal in found} == goals


def test_memory_slopes() -> None:
    """From one image to eight."""
    own = {"method": "untouched", "bytes_per_picture": None}
    parts = {f"sd15 512 batch {n}": {"rows": [own | {"peak_bytes": peak}]} for n, peak in ((1, 2e9), (8, 9e9))}
    assert memory_slopes(parts) == {"sd15 512": {"untouched": pytest.approx(1.0)}}


def test_correctness_host_and_report(suite: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods are right on this CPU; tables and plots are drawn by one command."""
    monkeypatch.setattr(correctness, "resolve_methods", lambda _: resolve_methods(["elfatt-fast"]))
    monkeypatch.setattr(suite, "FEW", ("elfatt-fast",))
    parts = run("correctness", "sd15 512 batch 1 host")["parts"]
    kinds = {(row["model"], row["dtype"], row["right"]) for row in parts["correctness"]["rows"]}
    assert kinds == {(model, dtype, True) for model in ("UNet", "Flux") for dtype in ("float32", "bfloat16")}
    for row in parts["sd15 512 batch 1 host"]["rows"]:
        assert 0 < row["host"] <= row["wall"]
        assert row["device"] > 0 and row["kernels"] >= len(row["longest"]) > 0
        assert any("scaled_dot_product" in name for name in row["attention"])
    files = [tmp_path / f"gpu_suite/{name}.png" for name in ("correctness", "sd15-512-batch-1-host")]
    assert write_suite(tmp_path / "gpu_suite.json") == [tmp_path / "gpu_suite.json", tmp_path / "gpu_suite.md", *files]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    text = (tmp_path / "gpu_suite.md").read_text()
    assert "| UNet | elfatt-fast/1 | bfloat16 | auto |" in text
    assert "![profile](gpu_suite/sd15-512-batch-1-host.png)" in text


def test_what_is_wrong_on_a_device_is_found(suite: Any, monkeypatch: pytest.MonkeyPatch, cpu: Any) -> None:
    """A patched layer that is a little off, one that raises, and one that gives NaN."""
    model = suite.Model(suite.random_unet(suite.TINY, cpu, torch.float32), 8)
    found = correctness._output

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
    """In a process that cannot import what only our other commands need, two parts run."""
    parts = ["merging", "sdxl 512 batch 48"]
    code = (
        "import runpy, sys\n"
        f"sys.modules.update(dict.fromkeys({NOT_NEEDED!r}))\n"  # None there makes an import fail
        f"sys.argv = {words(tmp_path, *parts)!r}\n"
        f"runpy.run_path({str(ROOT / 'benchmarks' / 'gpu_suite.py')!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert read(tmp_path)["errors"] == {} and list(read(tmp_path)["parts"]) == parts
