"""What is shipped: the wheel, metadata, files that must agree with one another, and what a type checker tells users."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

import elfatt_sd
from elfatt_sd.errors import PACKAGES

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def tracked(folder: str) -> set[str]:
    done = subprocess.run(["git", "ls-files", folder], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        pytest.skip("not a git checkout")
    return {line for line in done.stdout.splitlines() if (ROOT / line).exists()}


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(tmp_path: Path) -> None:
    """With licence, notice and command; no copy of a tool: unfinished weights share files with those of the package."""
    pytest.importorskip("hatchling", reason="hatchling builds the wheel: pip install -e '.[test]'")
    options = ["-qq", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(ROOT)]
    subprocess.run(command, check=True, timeout=300, stdin=subprocess.DEVNULL)
    [path] = tmp_path.glob("*.whl")
    assert path.stat().st_size < 25e6
    wheel = zipfile.ZipFile(path)
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert {*tracked("elfatt_sd"), "elfatt_sd/py.typed"} <= inside
    assert all(name.startswith("elfatt_sd/") for name in inside)
    protocols = {path.name for path in (ROOT / "eval").glob("*.toml")}
    assert protocols == {Path(name).name for name in inside if name.endswith(".toml")}
    said = {"/licenses/LICENSE": "MIT License", "/licenses/NOTICE": "kt@innocimda.com"}
    for ending, words in {**said, "/entry_points.txt": "elfatt-sd = elfatt_sd.cli:main"}.items():
        [name] = [name for name in wheel.namelist() if name.endswith(ending)]
        assert words in wheel.read(name).decode()
    assert not {wheel.read(name) for name in inside} & {(ROOT / line).read_bytes() for line in tracked("tools")}


def modules(nodes: Sequence[ast.AST]) -> set[str]:
    """Packages that statements import."""
    found = [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    found += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return {name.partition(".")[0] for name in found}


def names(lines: Iterable[str]) -> set[str]:
    """Packages that requirements name."""
    return {re.match(r"[\w-]+", line)[0].lower() for line in lines}  # type: ignore[index]


def test_imports_of_the_package_are_declared_and_in_their_place() -> None:
    """No tools; optional packages only where they are used."""
    optional, found = {package.module for package in PACKAGES.values()}, set[str]()
    for path in (ROOT / "elfatt_sd").rglob("*.py"):
        tree = ast.parse(path.read_text())
        assert not optional & modules(tree.body), f"{path}: it would be needed by whatever imports the file"
        found |= modules([*ast.walk(tree)])
    found -= sys.stdlib_module_names | {"elfatt_sd"}
    assert not {"tools", "tests", "benchmarks"} & found
    declared = names([*PROJECT["dependencies"], *(line for extra in EXTRAS.values() for line in extra)])
    homes = importlib.metadata.packages_distributions()
    offers = {name: {home.lower().replace("_", "-") for home in homes.get(name, [name])} for name in found}
    assert {name for name, offer in offers.items() if not offer & declared} == {"triton"}, "which PyTorch brings"


def test_the_extras_that_users_are_told_to_install_exist_and_hold_what_is_missing() -> None:
    sources = [path for kind in ("elfatt_sd/**/*.py", "*.md", "docs/*.md") for path in ROOT.glob(kind)]
    named = {extra for path in sources for extra in re.findall(r"(?:elfatt-sd|'\.)\[(\w+)\]", path.read_text())}
    assert {"eval", "inception"} <= named <= set(EXTRAS)
    for name, package in PACKAGES.items():
        assert name not in names(PROJECT["dependencies"])
        assert not package.extra or name.lower() in names(EXTRAS[package.extra])
    assert names(EXTRAS["eval"]) == {name for name, package in PACKAGES.items() if package.extra == "eval"}


def test_patents_and_versions_are_the_same_everywhere() -> None:
    for file in ("NOTICE", "README.md"):
        text = " ".join((ROOT / file).read_text().split())
        parts = ("19/011,779", "HK30118021A2", "202510108088.7", "kt@innocimda.com", "7 January 2025", "30 May 2025")
        assert [part for part in parts if part not in text] == [], file
    assert f"version: {elfatt_sd.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## [{elfatt_sd.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.lower().replace("_", "-").split("==") for line in lines)


def test_every_dependency_is_pinned_for_ci_for_every_python_that_the_project_takes() -> None:
    pinned, oldest = pins("constraints.txt"), pins("constraints-oldest.txt")
    tested = (line for extra in ("eval", "inception", "parquet", "docs", "test", "dev") for line in EXTRAS[extra])
    assert names([*PROJECT["dependencies"], *tested]) - {"elfatt-sd"} - set(pinned) == set()
    assert names([*PROJECT["dependencies"], *EXTRAS["eval"]]) - set(oldest) == set()
    python = PROJECT["requires-python"].removeprefix(">=") + ".0"
    here = [name for name in pinned if any(importlib.metadata.distributions(name=name))]
    wanted = {name: importlib.metadata.metadata(name).get("Requires-Python") for name in here}
    assert len(wanted) > 50
    assert [name for name, versions in wanted.items() if python not in SpecifierSet(versions or "")] == []


# Each line with `# E: words` must be an error with these words, and no other line may be one.
USES = """
from typing import Any, assert_type

import elfatt_sd
from elfatt_sd import METHODS, PatchConfig, Phase, Settings
from elfatt_sd.plans import Plan

class Pipeline:
    unet: Any

pipe = Pipeline()
assert_type(elfatt_sd.apply_patch(pipe, "elfatt", ratio=0.5, block_size=128, autotune=True), Pipeline)
with elfatt_sd.patched(pipe, PatchConfig.preset("agent", ratio=0.4), max_downsample=None) as planned:
    assert_type(planned, Plan)
shared: Settings = {"ratio": 0.5, "second_order": "spread"}
for method in METHODS:
    elfatt_sd.apply_patch(pipe, method, **shared)
elfatt_sd.plan(pipe, elfatt_sd.known_method(input()), height=512)
config = PatchConfig("mine", (Phase(0.5, "block", block_order="windows"),), levels=2)
tuned = elfatt_sd.tune(pipe, closeness=35, prompts=["a cat", "a dog"], metric=lambda first, second: 1.0)
assert_type(tuned.apply(pipe), Pipeline)

elfatt_sd.tune(pipe, closenes=35)  # E: "closenes"
elfatt_sd.apply_patch(pipe, "elfatt", ratioo=0.5)  # E: "ratioo"
elfatt_sd.apply_patch(pipe, "elfatt", ratio="half")  # E: "ratio"
elfatt_sd.plan(pipe, 5)  # E: "Literal[5]"
config.with_settings(attention_backend="flush")  # E: "attention_backend"
Phase(0.5, "elfatt", split="halves")  # E: "split"
"""
# What is not ours, or heavy, is `Any`: this test is of our own signatures.
CONFIG = """
[mypy]
strict = true
[mypy-elfatt_sd.*]
follow_imports = silent
[mypy-torch.*,diffusers.*,transformers.*,numpy.*,PIL.*,safetensors.*,huggingface_hub.*,rich.*,typer.*]
follow_imports = skip
"""


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy checks it: pip install -e '.[dev]'")
def test_wrong_uses_are_errors_and_right_ones_are_not(tmp_path: Path) -> None:
    (tmp_path / "uses.py").write_text(USES)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", "uses.py"]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    said: dict[int, str] = {}
    for number, text in re.findall(r"^uses\.py:(\d+): error: (.*)", done.stdout, re.MULTILINE):
        said[int(number)] = said.get(int(number), "") + text
    wanted = {number: line.partition("# E: ")[2] for number, line in enumerate(USES.splitlines(), 1) if "# E: " in line}
    assert said.keys() == wanted.keys(), done.stdout + done.stderr
    assert [words for number, words in wanted.items() if words not in said[number]] == [], done.stdout


def test_every_public_name_is_there_and_importing_the_package_loads_nothing() -> None:
    assert all(getattr(elfatt_sd, name) is not None for name in elfatt_sd.__all__)
    with pytest.raises(AttributeError, match="module 'elfatt_sd' has no attribute 'nothing'"):
        elfatt_sd.nothing  # noqa: B018
    lines = (
        "import sys, elfatt_sd",
        "assert not [name for name in sys.modules if name.startswith('elfatt_sd.')]",
        "assert not {'torch', 'diffusers', 'transformers', 'numpy'} & sys.modules.keys()",
        "elfatt_sd.PatchConfig.preset('elfatt', ratio=0.4)",
        "assert not {'diffusers', 'transformers'} & sys.modules.keys()",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, cwd=ROOT, timeout=100)
