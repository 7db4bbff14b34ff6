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
from support.commands import call, check_error

from benchmarks import correctness
from elfatt_sd.benchmarking import record as records
from elfatt_sd.benchmarking import unet as calls
from elfatt_sd.benchmarking.variants import resolve_methods

SUITE = Path(__file__).parents[2] / "benchmarks" / "gpu_suite.py"
NOT_NEEDED = (
    "accelerate",
    "jinja2",
    "matplotlib",
    "peft",
    "rich",
    "scipy",
    "torchmetrics",
    "torchvision",
    "transformers",
    "typer",
)


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", list(sys.path))
    return load_script("benchmarks/gpu_suite.py")


def few_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every part have two methods; `test_it_writes_after_every_part` has all."""
    monkeypatch.setattr(
        calls, "resolve_methods", lambda names, **options: resolve_methods(("tome", "elfatt-fast"), **options)
    )


def read(folder: Path) -> Any:
    return json.loads((folder / "gpu_suite.json").read_text())


def test_it_writes_after_every_part(suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that fails is written down; the others are there."""
    parts = "merging,kernels,sd15 512 batch 1,sd15 1024 batch 1 graph triton,sd15 512 batch 1 graph"
    words = ["gpu_suite.py", "--tiny", "--device", "cpu", "--out", str(tmp_path), "--only", parts]
    monkeypatch.setattr(sys, "argv", words)
    written = []
    original = suite.Suite.write
    monkeypatch.setattr(suite.Suite, "write", lambda self: (original(self), written.append(read(tmp_path)))[0])
    suite.main()
    assert [len(results["parts"]) for results in written] == [1, 2, 3, 4, 5, 5]
    assert written[-1]["errors"] == {}
    assert written[-1]["missing"].keys() <= {"flash", "_flash_3", "sage"}
    triton = written[-1]["parts"]["sd15 1024 batch 1 graph triton"]
    assert "attention_backend='triton' needs a GPU" in triton["groups"][0]["failed"]["tome/0"]
    assert "untouched" in {row["method"] for row in triton["rows"]}
    methods = {row["method"] for row in written[-1]["parts"]["sd15 512 batch 1"]["rows"]}
    assert {"untouched", "tomesd", "tome", "agent", "elfatt", "elfatt:ratio=0", "floor", "floor of 2 levels"} <= methods


def test_single_parts_are_added(suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the ten minutes before stay; not so those of another machine."""
    words = ["gpu_suite.py", "--tiny", "--device", "cpu", "--out", str(tmp_path), "--only"]
    for part in ("kernels", "merging"):
        monkeypatch.setattr(sys, "argv", [*words, part])
        suite.main()
    results = read(tmp_path)
    assert set(results["parts"]) == {"kernels", "merging"}
    results["parts"]["kernels"]["machine"]["device"] = "another"
    before = json.dumps(results)
    (tmp_path / "gpu_suite.json").write_text(before)
    with pytest.raises(SystemExit, match="holds 'kernels' of another machine"):
        suite.main()
    assert (tmp_path / "gpu_suite.json").read_text() == before


def test_every_kind_of_part_runs(suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Growth, a transformer, another layout, a large batch with few methods, compiled."""
    few_methods(monkeypatch)
    parts = ["growth", "flux 1024 batch 1", "sd15 1024 batch 1 graph channels_last", "sdxl 1024 batch 48"]
    parts.append("sd15 512 batch 1 compiled")
    words = ["gpu_suite.py", "--tiny", "--device", "cpu", "--out", str(tmp_path), "--only", ",".join(parts)]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(torch, "compile", lambda unet, dynamic: unet)
    suite.main()
    results = read(tmp_path)
    assert list(results["parts"]) == parts
    assert results["errors"] == {}
    assert {row["method"] for row in results["parts"]["flux 1024 batch 1"]["rows"]} >= {"untouched", "elfatt-fast"}
    assert set(results["parts"]["growth"]["exponents"]) == {"attention", "layer"}
    methods = [row["method"] for row in results["parts"]["sdxl 1024 batch 48"]["rows"]]
    assert methods == ["untouched", "tomesd", "tome", "elfatt-fast", "floor", "floor of 2 levels"]
    assert "elfatt-fast, compiled" in {row["method"] for row in results["parts"]["sd15 512 batch 1 compiled"]["rows"]}


def test_a_stopped_suite_still_concludes(suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["gpu_suite.py", "--tiny", "--device", "cpu", "--out", str(tmp_path), "--only", "merging,kernels"]
    monkeypatch.setattr(sys, "argv", words)

    def stop(self: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(suite.Suite, "kernels", stop)
    with pytest.raises(KeyboardInterrupt):
        suite.main()
    results = read(tmp_path)
    assert list(results["parts"]) == ["merging"]
    assert {"goals", "memory_slope"} <= set(results)


def test_a_part_that_fails_keeps_its_rounds(suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["gpu_suite.py", "--tiny", "--device", "cpu", "--out", str(tmp_path), "--only", "kernels,merging"]
    monkeypatch.setattr(sys, "argv", words)
    original, parts = suite.Record.time, []

    def time(self: Any, key: Any, *args: Any) -> None:
        if len(parts) == 2:
            raise RuntimeError("CUDA error")
        parts.append(key)
        original(self, key, *args)

    monkeypatch.setattr(suite.Record, "time", time)
    monkeypatch.setattr(suite.Suite, "merging", lambda self: parts.clear())
    suite.main()
    results = read(tmp_path)
    assert {row["tokens"] for row in results["parts"]["kernels"]["rows"]} == {256}
    assert len(results["parts"]["kernels"]["groups"]) == 2
    assert results["errors"] == {"kernels": "RuntimeError: CUDA error"}
    assert parts == [], "the suite goes on"


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="Windows")
@pytest.mark.parametrize("number", ["SIGTERM", "SIGALRM"])
def test_a_suite_that_is_asked_to_end_concludes(
    number: str, suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the system, or by its own clock; what the part that was going on had measured is kept."""
    words = ["gpu_suite.py", "--tiny", "--device", "cpu", "--out", str(tmp_path), "--only", "kernels,merging"]
    monkeypatch.setattr(sys, "argv", words)
    before = signal.getsignal(getattr(signal, number))
    original = suite.Record.time

    def time(self: Any, key: Any, *args: Any) -> None:
        original(self, key, *args)
        signal.raise_signal(getattr(signal, number))

    monkeypatch.setattr(suite.Record, "time", time)
    with pytest.raises(SystemExit, match=number):
        suite.main()
    results = read(tmp_path)
    assert list(results["parts"]) == ["kernels"]
    assert len(results["parts"]["kernels"]["groups"]) == 1
    assert results["errors"] == {"kernels": f"SystemExit: stopped by {number}"}
    assert {"goals", "memory_slope"} <= set(results)
    assert signal.getsignal(getattr(signal, number)) == before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_without_a_gpu_it_says_so(suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_suite.py", "--device", "cpu", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="no GPU here; --tiny"):
        suite.main()
    assert not list(tmp_path.iterdir())


def test_memory_slopes(suite: Any) -> None:
    """From one picture to eight."""
    parts = {}
    for pictures, peak in ((1, 2e9), (8, 9e9)):
        row = {"method": "untouched", "batch": 2 * pictures, "peak_bytes": peak, "bytes_per_picture": None}
        parts[f"sd15 512 batch {pictures}"] = {"rows": [row]}
    assert suite.memory_slopes(parts) == {"sd15 512": {"untouched": pytest.approx(1.0)}}


def timed(suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, seconds: dict[str, float]) -> Any:
    """Run a part with the clock faked: every variant takes what its name says, all others a second."""
    few_methods(monkeypatch)
    words = ["gpu_suite.py", "--tiny", "--device", "cpu", "--out", str(tmp_path), "--only", part]
    monkeypatch.setattr(sys, "argv", words)

    def time(calls: Any, repeats: int, *_: Any, times: Any, **__: Any) -> None:
        times |= {name: [seconds.get(name, 1.0)] * 7 for name in calls}

    monkeypatch.setattr(records, "time_in_turns", time)
    suite.main()
    return read(tmp_path)["goals"]


@pytest.mark.parametrize(("own", "met"), [(0.5, True), (0.55, True), (0.6, False)])
def test_a_goal_is_a_fraction_of_the_floors_gain(
    suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: float, met: bool
) -> None:
    """At 768 pixels and above, in the method's own phase: here the floor is twice as fast."""
    seconds = {"elfatt-fast/1": own, "floor of 2 levels": 0.5}
    goals = timed(suite, tmp_path, monkeypatch, "sd15 1024 batch 1", seconds)
    assert [(goal["method"], goal["what"]) for goal in goals] == [
        ("elfatt-fast", "fraction of its floor's gain, own phase")
    ]
    assert goals[0]["gain"] == pytest.approx(1 / own - 1)
    assert (goals[0]["gain"] >= goals[0]["goal"]) == met


def test_no_method_may_be_slower_at_512_with_graphs(
    suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goals = timed(suite, tmp_path, monkeypatch, "sd15 512 batch 1 graph", {"tome/0": 1.25, "elfatt-fast/1": 0.5})
    met = {goal["method"]: goal["gain"] >= goal["goal"] for goal in goals}
    assert met == {"tome": False, "elfatt-fast": True}


def test_every_part_is_there_and_correctness_comes_first(suite: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"tiny": True, "device": "cpu", "out": Path("x"), "only": None, "seconds": 1.0}
    made = suite.Suite(type("Options", (), options))
    names = list(made.parts)
    assert names[:2] == ["correctness", "sd15 512 batch 1 graph"]
    assert not made.parts.keys() & made.extra.keys()
    for word in ("768", "triton", "host", "kernels", "flux", "sd3.5-medium", "qwen-image", "channels_last", "sdxl"):
        assert any(word in name for name in names), word


def test_correctness_host_and_report(suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods are right on this CPU; one that is not is found; tables and plots are drawn by one command."""
    monkeypatch.setattr(correctness, "resolve_methods", lambda _: resolve_methods(["elfatt-fast"]))
    monkeypatch.setattr(suite, "FEW", ("elfatt-fast",))
    words = ["gpu_suite.py", "--tiny", "--device", "cpu", "--out", str(tmp_path), "--only"]
    monkeypatch.setattr(sys, "argv", [*words, "correctness,sd15 512 batch 1 host"])
    suite.main()
    parts = read(tmp_path)["parts"]
    rows = parts["correctness"]["rows"]
    assert {(row["model"], row["dtype"]) for row in rows} == {
        (model, dtype) for model in ("UNet", "Flux") for dtype in ("float32", "bfloat16")
    }
    assert all(row["right"] for row in rows)
    for row in parts["sd15 512 batch 1 host"]["rows"]:
        assert 0 < row["host"] <= row["wall"]
        assert row["device"] > 0 and row["kernels"] >= len(row["longest"]) > 0
        assert any("scaled_dot_product" in name for name in row["attention"])
    files = [tmp_path / f"gpu_suite/{name}.png" for name in ("correctness", "sd15-512-batch-1-host")]
    done = call("bench", "report", tmp_path / "gpu_suite.json")
    assert done.exit_code == 0, done.output
    assert done.stdout.split() == [str(tmp_path / "gpu_suite.json"), str(tmp_path / "gpu_suite.md"), *map(str, files)]
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


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "does not exist"), ("{", "is damaged"), ("{}", "holds no results"), ('{"parts": [1]}', "holds no results")],
)
def test_what_is_no_result_is_not_drawn(tmp_path: Path, content: str | None, says: str) -> None:
    file = tmp_path / "x.json"
    if content is not None:
        file.write_text(content)
    check_error(call("bench", "report", file), says)


def test_a_size_that_one_part_alone_has_gets_its_slope(
    suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And every part with peaks says which of our methods needs most."""
    few_methods(monkeypatch)
    parts = ["sd15 2048 batch 1", "sdxl 2048 batch 1", "sdxl 512 batch 48"]
    words = ["gpu_suite.py", "--tiny", "--device", "cpu", "--out", str(tmp_path), "--only", ",".join(parts)]
    monkeypatch.setattr(sys, "argv", words)
    suite.main()
    results = read(tmp_path)
    assert set(results["memory_slope"]) == {"sd15 2048", "sdxl 2048", "sdxl 512"}
    for slopes in results["memory_slope"].values():
        assert {"untouched", "tomesd", "tome", "elfatt-fast"} <= set(slopes)
        assert all(slope > 0 for slope in slopes.values())
    assert list(results["peaks"]) == parts
    assert all(peak["share"] > 0.5 for peak in results["peaks"].values())


def test_it_needs_torch_diffusers_and_tomesd_only(tmp_path: Path) -> None:
    """In a process that cannot import what only our other commands need, two parts run."""
    parts = ["merging", "sd15 512 batch 1"]
    words = ["gpu_suite.py", "--tiny", "--device", "cpu", "--out", str(tmp_path), "--only", ",".join(parts)]
    code = (
        "import runpy, sys\n"
        f"sys.modules.update(dict.fromkeys({NOT_NEEDED!r}))\n"  # None there makes an import fail
        f"sys.argv = {words!r}\n"
        f"runpy.run_path({str(SUITE)!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert read(tmp_path)["errors"] == {}
    assert list(read(tmp_path)["parts"]) == parts
