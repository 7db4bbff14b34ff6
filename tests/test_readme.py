"""The README and the other pages: their Python runs, their commands and settings exist, their links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import tiny_pipelines as tiny
from typer.testing import CliRunner

from elfatt_sd import methods, pipelines
from elfatt_sd.cli import app
from elfatt_sd.config import setting_names
from elfatt_sd.presets import METHODS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("eval/*.md")]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_three_line_use_comes_first() -> None:
    assert README.index("elfatt_sd.apply_patch(pipe") < README.index("make demo") < README.index("elfatt-sd generate")


def test_the_python_runs(folder: Path, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("ELFATT_SD_CACHE", str(tmp_path))
    pipe = tiny.sd15(folder)
    monkeypatch.setattr(pipelines, "load_pipeline", lambda *_, **__: pipe)
    names: dict[str, Any] = {"pipe": pipe}
    for block in blocks("python"):
        exec(block, names)
    from elfatt_sd.patch import current_config

    patch = current_config(pipe)
    assert patch is not None
    assert patch.phases[-1] == names["squares"]
    assert names["picture"].size == (32, 32)


def test_the_page_on_ones_own_attention_runs(folder: Path, monkeypatch: Any) -> None:
    """As many lines as it promises, and every block of them."""
    page = (ROOT / "docs/your-own-attention.md").read_text()
    monkeypatch.setattr(pipelines, "load_pipeline", lambda *_, **__: tiny.sd15(folder))
    monkeypatch.setattr(methods, "_known", dict(methods._known))
    names: dict[str, Any] = {"__name__": "__main__"}
    found = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
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
    table = README.split("## Methods")[1].split("##")[0]
    assert re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE) == list(METHODS)
    settings = README.split("| setting | meaning |")[1].split("##")[0]
    named = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| ([^|]+) \|", settings, re.MULTILINE))))
    assert named
    assert named <= set(setting_names())


def test_the_tested_versions_are_the_pinned_ones() -> None:
    for file in ("constraints.txt", "constraints-oldest.txt"):
        pins = dict(re.findall(r"^([\w-]+)==(.+)$", (ROOT / file).read_text(), re.MULTILINE))
        [line] = [line for line in README.splitlines() if f"diffusers {pins['diffusers']} with" in line]
        for package in ("torch", "transformers"):
            assert f"{package} {'.'.join(pins[package].split('.')[:2])}" in line
