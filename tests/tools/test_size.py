"""The sizes of a small project, and what passes its ceilings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import size

MODULE = '''"""A module.

Of two functions.
"""

# why
def long(x):
    """Say so."""
    if x:
        raise ValueError(x)

    return x


class Kind:
    async def short(self):
        """Nothing."""
'''
FOUND = {
    "package_lines": 18,
    "package_files": 3,
    "test_lines": 1,
    "test_files": 1,
    "root_modules": 2,
    "functions": 2,
    "short_functions_percent": 50.0,
    "docstrings_percent": 33.3,  # 6 of 18
    "raises_in_1000_lines_of_code": 142.9,  # 1 of 7
    "longest_file": 17,
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = {"elfatt_sd/__init__.py": "", "elfatt_sd/a.py": MODULE, "elfatt_sd/b/c/d.py": "x = 1\n"}
    for name, text in {**files, "tests/test_a.py": "x = 1\n", "tools/e.py": "x = 1\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def ceilings(project: Path, **changes: float) -> None:
    lines = [f"{name} = {value}" for name, value in {**FOUND, **changes}.items()]
    (project / "pyproject.toml").write_text("\n".join(["[tool.elfatt.size]", *lines]))


def test_everything_is_counted(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ceilings(project)
    assert size.main([], project) == 0
    said = capsys.readouterr().out
    assert {line.split()[1].rstrip(","): float(line.split()[0]) for line in said.splitlines()[5:]} == FOUND
    assert [line.split() for line in said.splitlines()[:4]] == [
        ["18", "lines", "in", "3", "files", "elfatt_sd"],
        ["1", "lines", "in", "1", "files", "elfatt_sd/b"],
        ["1", "lines", "in", "1", "files", "elfatt_sd/b/c"],
        ["1", "lines", "in", "1", "files", "tests"],
    ]


@pytest.mark.parametrize("name", FOUND)
def test_what_passes_its_ceiling_is_named(project: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    ceilings(project, **{name: FOUND[name] - 0.1})
    assert size.main(["--check"], project) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"error: {name} is {FOUND[name]}, more than ")
