"""The README and the other pages: their Python runs, their commands and settings exist, their links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from support import tiny_pipelines as tiny
from typer.testing import CliRunner

from elfatt_sd import loading as pipelines
from elfatt_sd import methods
from elfatt_sd.cli import app
from elfatt_sd.config import METHODS, setting_names

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCS = ROOT / "docs"
RESULTS = [ROOT / folder / "results/README.md" for folder in ("eval", "benchmarks")]
PAGES = [*ROOT.glob("*.md"), *DOCS.glob("*.md"), *ROOT.glob("eval/*.md"), *ROOT.glob("tools/*.md"), *RESULTS]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def test_what_is_needed_first_comes_first() -> None:
    order = [
        "pip install",
        "elfatt_sd.apply_patch(pipe",
        "elfatt_sd.remove_patch(pipe",
        "closeness (PSNR)",
        "headline.png",
    ]
    places = [README.index(said) for said in [*order, "**Not measured:**", "elfatt-sd generate"]]
    assert places == sorted(places)
    assert len(README.splitlines()) <= 120


@pytest.mark.parametrize("name", ["README.md", "docs/start.md", "docs/choose.md"])
def test_the_python_runs(folder: Path, monkeypatch: Any, tmp_path: Path, name: str) -> None:
    monkeypatch.setenv("ELFATT_SD_CACHE", str(tmp_path))
    pipe = tiny.sd15(folder)
    monkeypatch.setattr(pipelines, "load_pipeline", lambda *_, **__: pipe)
    names: dict[str, Any] = {"pipe": pipe}
    for block in blocks(ROOT / name):
        exec(block, names)
    from elfatt_sd.patch import current_config

    patch = current_config(pipe)
    assert patch is not None
    if "squares" in names:
        assert patch.phases[-1] == names["squares"]
    else:
        assert names["image"].size == (32, 32)


def test_the_page_on_ones_own_attention_runs(folder: Path, monkeypatch: Any) -> None:
    """As many lines as it promises, and every block of them."""
    monkeypatch.setattr(pipelines, "load_pipeline", lambda *_, **__: tiny.sd15(folder))
    monkeypatch.setattr(methods, "_known", dict(methods._known))
    names: dict[str, Any] = {"__name__": "__main__"}
    found = blocks(DOCS / "your-own-attention.md")
    assert len([line for line in found[0].splitlines() if line.strip()]) <= 30
    for block in found:
        exec(block, names)
    assert names["late"].phases[1].attention.height == 8
    assert names["image"].size == (32, 32)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


def commands() -> list[str]:
    lines = [line for page in PAGES for line in page.read_text().splitlines()]
    found = [line.partition("#")[0].strip() for line in lines if re.match(r"\s*(elfatt-sd|python cli\.py) ", line)]
    return sorted(set(found))


@pytest.mark.parametrize("command", commands())
def test_commands_exist_with_their_options(command: str) -> None:
    words = shlex.split(command.replace("...", "").rstrip("\\"))
    words = words[1:] if words[0] == "elfatt-sd" else words[2:]
    depth = 2 if words[0] in ("eval", "bench") else 1
    shown = CliRunner().invoke(app, [*words[:depth], "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    for option in (word for word in words if word.startswith("--")):
        assert re.search(rf"{re.escape(option)}\b", shown.output), f"{option} is no option of {words[:depth]}"


def test_every_method_is_described_and_every_setting_exists() -> None:
    page = (DOCS / "choose.md").read_text()
    table = page.split("## Methods")[1].split("##")[0]
    assert re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE) == list(METHODS)
    settings = page.split("| setting | meaning |")[1].split("##")[0]
    named = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| ([^|]+) \|", settings, re.MULTILINE))))
    assert named
    assert named <= set(setting_names())


def test_the_tested_versions_are_the_pinned_ones() -> None:
    for file in ("constraints.txt", "constraints-oldest.txt"):
        pins = dict(re.findall(r"^([\w-]+)==(.+)$", (ROOT / file).read_text(), re.MULTILINE))
        for page in (README, (DOCS / "compatibility.md").read_text()):
            said = " ".join(page.split())
            found = re.search(
                rf"diffusers {re.escape(pins['diffusers'])}(?: with|,) torch ([\d.]+) and transformers ([\d.]+)", said
            )
            assert found is not None
            short = [".".join(pins[package].split(".")[:2]) for package in ("torch", "transformers")]
            assert [version.rstrip(".") for version in found.groups()] == short
