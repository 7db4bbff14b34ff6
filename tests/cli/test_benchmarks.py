"""`elfatt-sd bench`: what it prints, saves and refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from cli_checks import call, check_error, files

from elfatt_sd import benchmark_cli

pytestmark = pytest.mark.usefixtures("library_chatter")


def test_bench_prints_and_saves(tmp_path: Path) -> None:
    result = call("bench", "merging", "--tokens", 64, "--repeats", 1, "--dtype", "float32", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "64 tokens, batch 2, float32" in result.stdout
    assert "|" not in result.stdout and "nbsp" not in result.stdout
    assert "64 tokens, batch 2, float32: ours is " in result.stdout or "no method is faster than" in result.stdout
    assert "One round tells little: repeat with more rounds." in result.stdout
    assert result.stderr.startswith("6 calls in all\n64 tokens, batch 2, float32: 0 of 6 calls done\n")
    assert files(tmp_path / "out") == ["merging.json", "merging.md", "merging.png"]


def test_bench_prints_markdown_on_request() -> None:
    result = call("bench", "merging", "--tokens", 64, "--repeats", 1, "--dtype", "float32", "--markdown")
    assert "64 tokens, batch 2, float32:" in result.stdout
    assert "\n| tomesd | " in result.stdout


def test_bench_shows_a_bar_that_counts_calls(monkeypatch: Any) -> None:
    """Rounds times variants of all sizes, and the warm-up of each."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    words = ["--tokens", 64, "--tokens", 256, "--repeats", 2, "--dtype", "float32"]
    shown = call("bench", "merging", *words)
    counts = re.findall(r"(\d+)/(\d+) calls", shown.stderr)
    assert counts[-1] == ("18", "18")
    assert {total for _, total in counts} == {"15", "18"}  # the second size's warm-up is known when it begins
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in shown.stdout.splitlines()]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["layer", "--tokens", "65"], "tokens=65"),
        (["layer", "--tokens", "-4"], "tokens=-4"),
        (["layer", "--tokens", "64", "--block-size", "0"], "block_size=0"),
        (["merging", "--tokens", "64", "--ratio", "-1"], "ratio=-1.0"),
        (["unet", "--memory-batch", "0"], "memory_batch=0"),
        (["pipeline", "--steps", "5000"], "steps=5000 is not accepted; give a whole number from 1 to 1000"),
        (["orders", "--steps", "0"], "steps=0"),
        (["orders", "--steps", "5000"], "steps=5000"),
        (["orders", "--guidance", "nan"], "guidance=nan"),
        (["orders", "--seed", "-1"], "seed=-1"),
        (["orders", "--method", "faster"], "method='faster'"),
        (["orders", "--size", "7"], "size=7"),
        (["orders", "--record-at", "30", "--model", "toy-dit"], "record_at=[30] is not accepted"),
        (["orders", "--record-at", "3", "--every-step"], "--record-at is not accepted with --every-step"),
        (["host", "--size", "1000000000"], "size=1000000000 is not accepted; give a whole number from 8 to 16384"),
        (["host", "--batch", "1000000"], "batch=1000000"),
        (["unet", "--size", "0", "--method", "tome"], "size=0"),
        (["unet", "--method", "tomesd:agents=8"], "setting 'agents' of tomesd"),
        (["layer", "--repeats", "0"], "repeats=0"),
        (["unet", "--batch", "0"], "batch=0"),
        (["pipeline", "--steps", "0"], "steps=0"),
        (["unet", "--method", "faster"], "method='faster'"),
        (["unet", "--model", "nowhere"], "nowhere"),
        (["merging", "--out", "/proc/out"], "out='/proc/out' cannot be written"),
    ],
)
def test_bench_rejects(words: list[str], says: str) -> None:
    check_error(call("bench", *words), says)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["bench", "denoiser", "--model", "sd15", "--no-memory", "--memory-batch", "2"], "not accepted with --no-mem"),
        (["bench", "layer", "--again", "--tokens", "3"], "again has no effect without --out DIR"),
    ],
)
def test_options_of_benchmarks_without_effect(words: list[str], says: str) -> None:
    result = call(*words)
    assert result.exit_code == 2 and says in result.stderr


def test_settings_of_benchmarks_without_effect(monkeypatch: Any) -> None:
    stopped = SystemExit(7)

    def stop(*_: Any) -> None:
        raise stopped

    monkeypatch.setattr(benchmark_cli, "quiet_libraries", stop)
    words = ["bench", "pipeline", "--model", "toy", "--method", "elfatt-fast:stride=3", "--ratio", "0.4"]
    assert call(*words).stderr.splitlines() == [
        "warning: stride=3 has no effect on method 'elfatt-fast'",
        "warning: ratio=0.4 has no effect on methods that do not merge",
    ]
