"""What is shipped: the wheel's content and size, the metadata, and files that must agree with one another."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

import elfatt_sd
from elfatt_sd.errors import PACKAGES

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    pytest.importorskip("hatchling", reason="hatchling builds the wheel: pip install -e '.[test]'")
    out = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-qq",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        str(ROOT),
    ]
    subprocess.run(command, check=True, timeout=300, stdin=subprocess.DEVNULL)
    [path] = out.glob("*.whl")
    assert path.stat().st_size < 25e6
    return zipfile.ZipFile(path)


def tracked(folder: str) -> set[str]:
    done = subprocess.run(["git", "ls-files", folder], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        pytest.skip("not a git checkout")
    return {line for line in done.stdout.splitlines() if (ROOT / line).exists()}


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert tracked("elfatt_sd") <= inside
    assert all(name.startswith("elfatt_sd/") for name in inside)
    assert "elfatt_sd/py.typed" in inside
    protocols = {path.name for path in (ROOT / "eval").glob("*.toml")}
    assert protocols == {Path(name).name for name in inside if name.endswith(".toml")}


def test_the_wheel_names_licence_notice_and_command(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    [licence] = [name for name in names if name.endswith("/licenses/LICENSE")]
    [notice] = [name for name in names if name.endswith("/licenses/NOTICE")]
    [entries] = [name for name in names if name.endswith("/entry_points.txt")]
    assert "MIT License" in wheel.read(licence).decode()
    assert "kt@innocimda.com" in wheel.read(notice).decode()
    assert "elfatt-sd = elfatt_sd.cli:main" in wheel.read(entries).decode()


def test_the_extras_that_users_are_told_to_install_exist() -> None:
    extras = set(PROJECT["optional-dependencies"])
    assert {"eval", "flash", "inception", "notebooks", "docs", "test", "dev"} <= extras
    sources = [path for kind in ("elfatt_sd/**/*.py", "*.md", "docs/*.md") for path in ROOT.glob(kind)]
    named = {extra for path in sources for extra in re.findall(r"(?:elfatt-sd|'\.)\[(\w+)\]", path.read_text())}
    assert {"eval", "inception"} <= named <= extras


def imports(path: Path) -> set[str]:
    """Modules that a file imports anywhere, in their full names."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}


def test_nothing_in_the_package_imports_the_tools() -> None:
    for path in (ROOT / "elfatt_sd").rglob("*.py"):
        assert not {"tools", "tests", "benchmarks"} & {module.partition(".")[0] for module in imports(path)}, path


def test_the_wheel_holds_none_of_the_tools(wheel: zipfile.ZipFile) -> None:
    """Nor a copy of a file of it; the unfinished weights share files with those of the package."""
    inside = {wheel.read(name): name for name in wheel.namelist()}
    files = {ROOT / line for line in tracked("tools")}
    assert {path.parent.name for path in files} >= {"pages", "toy", "toy_dit", "weights-training"}
    assert {inside.get(path.read_bytes()) for path in files} == {None}


def test_every_import_is_declared() -> None:
    found = set().union(*(imports(path) for path in (ROOT / "elfatt_sd").rglob("*.py")))
    imported = {name.partition(".")[0] for name in found} - sys.stdlib_module_names - {"elfatt_sd"}
    lines = [*PROJECT["dependencies"], *(line for extra in PROJECT["optional-dependencies"].values() for line in extra)]
    declared = names(lines)
    homes = importlib.metadata.packages_distributions()
    offers = {name: {home.lower().replace("_", "-") for home in homes.get(name, [name])} for name in imported}
    undeclared = {name for name, offer in offers.items() if not offer & declared}
    assert undeclared == {"triton"}, "which comes with PyTorch"


def names(lines: list[str]) -> set[str]:
    """Packages that requirements name."""
    return {re.match(r"[\w-]+", line)[0].lower() for line in lines}  # type: ignore[index]


def test_a_missing_package_names_the_extra_that_installs_it() -> None:
    extras = PROJECT["optional-dependencies"]
    for name, package in PACKAGES.items():
        assert name not in names(PROJECT["dependencies"])
        assert not package.extra or name.lower() in names(extras[package.extra])
    assert names(extras["eval"]) == {name for name, package in PACKAGES.items() if package.extra == "eval"}


def test_optional_packages_are_imported_where_they_are_used() -> None:
    """At the top of a file they would be needed by whatever imports it."""
    optional = {package.module for package in PACKAGES.values()}
    for path in (ROOT / "elfatt_sd").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            found = {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
            found |= {str(node.module)} if isinstance(node, ast.ImportFrom) else set()
            assert not {name.partition(".")[0] for name in found} & optional, path


@pytest.mark.parametrize("folder", ["attention", "methods", "families", "runtime"])
def test_the_core_knows_no_peer(folder: str) -> None:
    """Nor does mathematics but for backends know diffusers."""
    for path in (ROOT / "elfatt_sd" / folder).rglob("*.py"):
        found = {name.partition(".")[0] for name in imports(path)}
        assert "tomesd" not in found, path
        assert "diffusers" not in found or folder != "attention" or path.name == "softmax.py", path


def test_the_patents_are_named_as_the_paper_does() -> None:
    for file in ("NOTICE", "README.md"):
        text = " ".join((ROOT / file).read_text().split())
        for part in (
            "19/011,779",
            "HK30118021A2",
            "202510108088.7",
            "kt@innocimda.com",
            "7 January 2025",
            "30 May 2025",
        ):
            assert part in text, f"{file} lacks {part}"


def test_versions_agree() -> None:
    assert f"version: {elfatt_sd.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## [{elfatt_sd.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.lower().replace("_", "-").split("==") for line in lines)


def test_every_dependency_is_pinned_for_ci() -> None:
    extras = PROJECT["optional-dependencies"]
    tested = (line for extra in ("eval", "inception", "parquet", "docs", "test", "dev") for line in extras[extra])
    needed = [*PROJECT["dependencies"], *tested]
    assert names(needed) - {"elfatt-sd"} - set(pins("constraints.txt")) == set()
    oldest = pins("constraints-oldest.txt")
    assert names([*PROJECT["dependencies"], *extras["eval"]]) - set(oldest) == set()
    assert oldest["diffusers"] == "0.32.1"


def test_what_is_pinned_takes_every_python_that_the_project_takes() -> None:
    oldest = PROJECT["requires-python"].removeprefix(">=") + ".0"
    here = filter(_is_here, pins("constraints.txt"))
    wanted = {name: importlib.metadata.metadata(name).get("Requires-Python") for name in here}
    refused = {name: versions for name, versions in wanted.items() if oldest not in SpecifierSet(versions or "")}
    assert len(wanted) > 50
    assert refused == {}


def _is_here(name: str) -> bool:
    return any(importlib.metadata.distributions(name=name))


def test_ruff_is_pinned_once() -> None:
    [pinned] = [line for line in PROJECT["optional-dependencies"]["dev"] if line.startswith("ruff")]
    version = pinned.partition("==")[2]
    assert version == pins("constraints.txt")["ruff"]
    assert f"rev: v{version}" in (ROOT / ".pre-commit-config.yaml").read_text()


def test_ci_runs_what_the_readme_says() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in ("test", "test-apart", "lint", "docs", "test-oldest", "notebooks", "demo"):
        assert re.search(rf"\bmake (-s )?{target}$", script, re.MULTILINE)
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
        assert any(f"make {target}" in (ROOT / page).read_text() for page in ("README.md", "CONTRIBUTING.md"))
    assert "bash .ci/run" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
