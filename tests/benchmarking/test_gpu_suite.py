"""The suite for one GPU, tried with its tiny models: it writes after every part and needs few packages."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checks import load_script

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


def few_methods(suite: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every part have two methods; `test_it_writes_after_every_part` has all."""
    resolve = suite.resolve_methods
    monkeypatch.setattr(suite, "resolve_methods", lambda names, **options: resolve(("tome", "elfatt-fast"), **options))


def read(folder: Path) -> Any:
    return json.loads((folder / "gpu_suite.json").read_text())


def test_it_writes_after_every_part(suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that fails is written down; the others are there."""
    parts = "merging,backends,sd15 512 batch 1,sd15 512 batch 8,sd15 512 batch 1 graph"
    words = ["gpu_suite.py", "--tiny", "--device", "cpu", "--out", str(tmp_path), "--only", parts]
    monkeypatch.setattr(sys, "argv", words)
    written = []
    original = suite.Suite.write
    monkeypatch.setattr(suite.Suite, "write", lambda self: (original(self), written.append(read(tmp_path)))[0])
    suite.main()
    assert [len(results["parts"]) for results in written] == [1, 2, 3, 4, 4, 4]
    assert "ElfattError" in written[-1]["errors"]["sd15 512 batch 1 graph"]
    assert {goal["method"] for goal in written[-1]["goals"]} == {"elfatt", "elfatt-fast"}
    methods = {row["method"] for row in written[-1]["parts"]["sd15 512 batch 1"]["rows"]}
    assert {"untouched", "tomesd", "tome", "agent", "elfatt", "elfatt:ratio=0", "floor", "floor of 2 levels"} <= methods


def test_single_parts_are_added(suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the ten minutes before stay; not so those of another machine."""
    words = ["gpu_suite.py", "--tiny", "--device", "cpu", "--out", str(tmp_path), "--only"]
    for part in ("backends", "merging"):
        monkeypatch.setattr(sys, "argv", [*words, part])
        suite.main()
    results = read(tmp_path)
    assert set(results["parts"]) == {"backends", "merging"}
    results["parts"]["backends"]["machine"]["device"] = "another"
    before = json.dumps(results)
    (tmp_path / "gpu_suite.json").write_text(before)
    with pytest.raises(SystemExit, match="holds 'backends' of another machine"):
        suite.main()
    assert (tmp_path / "gpu_suite.json").read_text() == before


def test_every_kind_of_part_runs(suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Growth, a large batch with few methods, compiled, and a kernel that is not there."""
    import torch

    few_methods(suite, monkeypatch)
    parts = ["growth", "sdxl 1024 batch 48", "sd15 512 batch 1 compiled", "sd15 1024 batch 1 flash"]
    words = ["gpu_suite.py", "--tiny", "--device", "cpu", "--out", str(tmp_path), "--only", ",".join(parts)]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(torch, "compile", lambda unet, dynamic: unet)
    suite.main()
    results = read(tmp_path)
    assert list(results["parts"]) == parts[:3]
    assert set(results["parts"]["growth"]["exponents"]) == {"attention", "layer"}
    methods = [row["method"] for row in results["parts"]["sdxl 1024 batch 48"]["rows"]]
    assert methods == ["untouched", "tomesd", "tome", "elfatt-fast", "floor", "floor of 2 levels"]
    assert "elfatt-fast, compiled" in {row["method"] for row in results["parts"]["sd15 512 batch 1 compiled"]["rows"]}
    assert results["errors"]["sd15 1024 batch 1 flash"].startswith("ElfattError: attention_backend='flash'")


def test_a_stopped_suite_still_concludes(suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["gpu_suite.py", "--tiny", "--device", "cpu", "--out", str(tmp_path), "--only", "merging,backends"]
    monkeypatch.setattr(sys, "argv", words)

    def stop(self: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(suite.Suite, "backends", stop)
    with pytest.raises(KeyboardInterrupt):
        suite.main()
    results = read(tmp_path)
    assert list(results["parts"]) == ["merging"]
    assert {"goals", "memory_slope"} <= set(results)


def test_a_part_that_fails_keeps_its_rounds(suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["gpu_suite.py", "--tiny", "--device", "cpu", "--out", str(tmp_path), "--only", "backends,merging"]
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
    assert {row["tokens"] for row in results["parts"]["backends"]["rows"]} == {256}
    assert len(results["parts"]["backends"]["groups"]) == 2
    assert results["errors"] == {"backends": "RuntimeError: CUDA error"}
    assert parts == [], "the suite goes on"


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="Windows")
@pytest.mark.parametrize("number", ["SIGTERM", "SIGALRM"])
def test_a_suite_that_is_asked_to_end_concludes(
    number: str, suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the system, or by its own clock; what the part that was going on had measured is kept."""
    words = ["gpu_suite.py", "--tiny", "--device", "cpu", "--out", str(tmp_path), "--only", "backends,merging"]
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
    assert list(results["parts"]) == ["backends"]
    assert len(results["parts"]["backends"]["groups"]) == 1
    assert results["errors"] == {"backends": f"SystemExit: stopped by {number}"}
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
    fake = type("Fake", (), {"results": {"parts": {}}})()
    for pictures, peak in ((1, 2e9), (8, 9e9)):
        row = {"method": "untouched", "batch": 2 * pictures, "peak_bytes": peak, "bytes_per_picture": None}
        fake.results["parts"][f"sd15 512 batch {pictures}"] = {"rows": [row]}
    assert suite.Suite.memory_slopes(fake) == {"sd15 512": {"untouched": pytest.approx(1.0)}}


def test_what_is_asked_of_a_gpu(suite: Any) -> None:
    assert suite.GOALS == [
        ("elfatt", "sd15", 512, 1.09),
        ("elfatt-fast", "sd15", 512, 1.25),
        ("elfatt-fast", "sd15", 1024, 1.8),
        ("elfatt-fast", "sd15", 2048, 3.0),
    ]


def test_a_size_that_one_part_alone_has_gets_its_slope(
    suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And every part with peaks says which of our methods needs most."""
    few_methods(suite, monkeypatch)
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
