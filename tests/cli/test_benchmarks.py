"""`elfatt-sd bench`: what it prints, saves and refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.commands import call, check_error, files

pytestmark = pytest.mark.usefixtures("library_chatter")


def test_bench_prints_and_saves(tmp_path: Path) -> None:
    """A second time, too: a benchmark begins again."""
    words = ["--tokens", 64, "--repeats", 1, "--no-memory", "--dtype", "float32", "--out", tmp_path / "out"]
    for _ in range(2):
        result = call("bench", "layer", *words)
        assert result.exit_code == 0, result.output
        assert "64 tokens, batch 2, layer" in result.stdout
        assert "|" not in result.stdout and "nbsp" not in result.stdout
        assert "One round tells little: repeat with more rounds." in result.stdout or "no method is" in result.stdout
        assert re.match(r"(\d+) calls in all\n64 tokens, batch 2, attention: 0 of \1 calls done\n", result.stderr)
        assert files(tmp_path / "out") == ["layer.json", "layer.md", "layer.png"]


def test_bench_prints_markdown_on_request() -> None:
    result = call("bench", "layer", "--tokens", 64, "--repeats", 1, "--no-memory", "--dtype", "float32", "--markdown")
    assert "64 tokens, batch 2:" in result.stdout
    assert "\n| layer | tomesd 0.5 | " in result.stdout


def test_bench_shows_a_bar_that_counts_calls(monkeypatch: Any) -> None:
    """Rounds times variants of all sizes, and the warm-up of each."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    words = ["--tokens", 64, "--tokens", 256, "--repeats", 2, "--no-memory", "--dtype", "float32"]
    shown = call("bench", "layer", *words)
    counts = [(int(done), int(total)) for done, total in re.findall(r"(\d+)/(\d+) calls", shown.stderr)]
    variants = counts[-1][0] / 3 / 2  # a warm-up and two rounds, at two sizes
    assert counts[-1][0] == counts[-1][1] and variants.is_integer()
    assert min(total for _, total in counts) > counts[-1][1] - 3 * variants, "only warm-ups come as a surprise"
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in shown.stdout.splitlines()]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["layer", "--tokens", "65"], "tokens=65"),
        (["layer", "--tokens", "-4"], "tokens=-4"),
        (["layer", "--tokens", "64", "--block-size", "0"], "block_size=0"),
        (["pipeline", "--ratio", "-1"], "ratio=-1.0"),
        (["unet", "--memory-batch", "0"], "memory_batch=0"),
        (["host"], "No such command 'host'"),
        (["pipeline", "--steps", "5000"], "steps=5000 is not accepted; give a whole number from 1 to 1000"),
        (["unet", "--size", "0", "--method", "tome"], "size=0"),
        (["unet", "--method", "tomesd:agents=8"], "setting 'agents' of tomesd"),
        (["layer", "--repeats", "0"], "repeats=0"),
        (["unet", "--batch", "0"], "batch=0"),
        (["pipeline", "--steps", "0"], "steps=0"),
        (["unet", "--method", "faster"], "method='faster'"),
        (["unet", "--model", "nowhere"], "nowhere"),
        (["layer", "--out", "/proc/out"], "out='/proc/out' cannot be written"),
    ],
)
def test_bench_rejects(words: list[str], says: str) -> None:
    check_error(call("bench", *words), says)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["bench", "denoiser", "--model", "sd15", "--no-memory", "--memory-batch", "2"], "not accepted with --no-mem"),
    ],
)
def test_options_of_benchmarks_without_effect(words: list[str], says: str) -> None:
    result = call(*words)
    assert result.exit_code == 2 and says in result.stderr
