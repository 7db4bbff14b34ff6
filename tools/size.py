"""How large the package and its tests are: `python -m tools.size`; with `--check`, only what passes its ceiling.

The ceilings are `[tool.elfatt.size]` of pyproject.toml.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elfatt_sd.cli.console import DONE, FAILURE, complain

ROOT = Path(__file__).parents[1]
PACKAGE, TESTS = "elfatt_sd", "tests"
SHORT = 3  # lines of a body, without its docstring
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Measured:
    """A Python file."""

    path: Path  # from the root of the project
    lines: int
    code: int  # lines that are not blank, a comment or part of a docstring
    docstrings: int  # lines
    functions: int
    short: int  # functions with a body of at most `SHORT` lines
    raises: int


def measure(path: Path) -> Measured:
    """Count what is in a file."""
    text = path.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(text)))
    documented = [node.body[0] for node in nodes if isinstance(node, _Documented) and _has_docstring(node)]
    inside = {line for first in documented for line in range(first.lineno, (first.end_lineno or first.lineno) + 1)}
    bodies = [node.body[_has_docstring(node) :] for node in nodes if isinstance(node, _Function)]
    short = sum(not body or (body[-1].end_lineno or 0) - body[0].lineno < SHORT for body in bodies)
    lines = text.splitlines()
    code = sum(line.strip()[:1] not in ("", "#") for place, line in enumerate(lines, 1) if place not in inside)
    raises = sum(isinstance(node, ast.Raise) for node in nodes)
    return Measured(path.relative_to(ROOT), len(lines), code, len(inside), len(bodies), short, raises)


def _has_docstring(node: _Documented) -> bool:
    return ast.get_docstring(node, clean=False) is not None


def figures(files: Sequence[Measured]) -> dict[str, float]:
    """Return what has a ceiling, by its name in pyproject.toml; but for lines and files of tests, of the package."""
    package = [file for file in files if file.path.parts[0] == PACKAGE]
    tests = [file for file in files if file.path.parts[0] == TESTS]
    lines, code, functions = (sum(getattr(f, name) for f in package) for name in ("lines", "code", "functions"))
    return {
        "package_lines": lines,
        "package_files": len(package),
        "test_lines": sum(file.lines for file in tests),
        "test_files": len(tests),
        "root_modules": sum(len(file.path.parts) == 2 for file in package),
        "functions": functions,
        "short_functions_percent": round(100 * sum(file.short for file in package) / max(1, functions), 1),
        "docstrings_percent": round(100 * sum(file.docstrings for file in package) / max(1, lines), 1),
        "raises_in_1000_lines_of_code": round(1000 * sum(file.raises for file in package) / max(1, code), 1),
        "longest_file": max((file.lines for file in package), default=0),
    }


def by_folder(files: Sequence[Measured]) -> list[str]:
    """Return lines and files of each folder, those of its own folders included."""
    lines: Counter[str] = Counter()
    number: Counter[str] = Counter()
    for file in files:
        for depth in range(1, len(file.path.parts)):
            folder = "/".join(file.path.parts[:depth])
            lines[folder] += file.lines
            number[folder] += 1
    return [f"{lines[name]:7,} lines in {number[name]:3} files  {name}" for name in sorted(lines)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the sizes and return the exit code: `FAILURE` where one passes its ceiling."""
    parser = argparse.ArgumentParser(prog="python -m tools.size", description=__doc__)
    parser.add_argument("--check", action="store_true", help="print only what is too large")
    check = parser.parse_args(arguments).check
    ceilings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["elfatt"]["size"]
    files = [measure(path) for part in (PACKAGE, TESTS) for path in sorted((ROOT / part).rglob("*.py"))]
    found = figures(files)
    if not check:
        print("\n".join([*by_folder(files), ""]))
        print("\n".join(f"{found[name]:8,} {name}, at most {ceilings[name]:,}" for name in found))
    over = [name for name in found if found[name] > ceilings[name]]
    for name in over:
        complain(f"{name} is {found[name]}, more than {ceilings[name]} in pyproject.toml: make it smaller")
    return FAILURE if over else DONE


if __name__ == "__main__":
    sys.exit(main())
