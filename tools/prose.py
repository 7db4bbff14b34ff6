"""A linter of prose: proselint with the project's word list, and the length of sentences: `python -m tools.prose`.

It reads the pages, the notebooks, the model cards, and the docstrings, help, messages and templates of the package and
of the tools; or the files that are given.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from elfatt_sd.cli.console import DONE, FAILURE, complain

ROOT = Path(__file__).parents[1]
PAGES = ("*.md", "docs/*.md", "eval/*.md", "benchmarks/*.md", "tools/*.md", "elfatt_sd/toy/*/*.md", "notebooks/*.ipynb")
PACKAGE = ("elfatt_sd/**/*.py", "elfatt_sd/**/*.html.j2", "tools/**/*.py")
RULES: dict[str, Any] = tomllib.loads((ROOT / "tools" / "words.toml").read_text(encoding="utf-8"))

_KEPT = re.compile("|".join(map(re.escape, RULES["kept"]["strings"])))
_CODE = re.compile(r"^(```|~~~).*?^\1$|<!--.*?-->|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_FENCED = re.compile(r"^(?::::|    ).*$", re.MULTILINE)
_TABLE = re.compile(r"^(?:\||#|!\[).*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^\s*\**\w+: ", re.MULTILINE)
_TAG = re.compile(r"<[^>]*>|\{[{%#].*?[}%#]\}", re.DOTALL)
_TARGET = re.compile(r"\]\([^)]*\)|https?://\S+")
_BREAK = re.compile(r"\n\s*\n|^\s*(?:[-*]|\d+\.) ", re.MULTILINE)
_END = re.compile(r"(?<=[.:;?!])\s+(?=[A-Z*\[x])")


def prose_of(text: str) -> str:
    """Return a page with everything but its sentences blanked out, so that lines and columns stay."""
    return _TABLE.sub(_blank, words_of(text))


def words_of(text: str) -> str:
    """Return a page with its code and its addresses blanked out; titles and tables stay."""
    for pattern in (_CODE, _FENCED, _TARGET):
        text = pattern.sub(_blank, text)
    return text


def _blank(found: re.Match[str]) -> str:
    """Keep a piece of code as one word of its sentence, and nothing of the rest but its lines."""
    inline = found[0].startswith("`") and "\n" not in found[0]
    return re.sub(r"[^\n]", "x" if inline else " ", found[0])


def strings_of(source: str) -> str:
    """Return a Python file with only its docstrings, help and messages: constants with several words.

    Code in them and the names of arguments are blanked out, and so is what the word list keeps.
    """
    lines = [""] * (source.count("\n") + 1)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            for place, line in enumerate(_ARGUMENT.sub(" ", _CODE.sub(_blank, node.value)).splitlines()):
                lines[min(node.lineno - 1 + place, len(lines) - 1)] += f" {line}"
    return _KEPT.sub(" ", "\n".join(lines))


def cells_of(source: str) -> str:
    """Return the Markdown cells of a notebook, one after the other."""
    cells = json.loads(source)["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def complaints(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and what is wrong with it, of a text that is nothing but prose."""
    for pattern, better in RULES["words"].items():
        for found in re.finditer(rf"\b{pattern}\b", text, re.IGNORECASE):
            yield text.count("\n", 0, found.start()) + 1, f"{found[0]!r}; better: {better}"
    yield from _proselint(text)


def _proselint(text: str) -> Iterator[tuple[int, str]]:
    """Yield what proselint says, by the checks that the word list names."""
    from proselint.checks import __register__
    from proselint.config import DEFAULT
    from proselint.registry import CheckRegistry
    from proselint.tools import LintFile

    registry = CheckRegistry()
    if not registry.checks:
        registry.register_many(__register__)
    checks = {name: name in RULES["proselint"]["checks"] for name in DEFAULT["checks"]}
    for found in LintFile("page", text or " ").lint({**DEFAULT, "checks": checks}):
        yield found.pos[0], found.check_result.message


def sentences(text: str) -> list[tuple[int, int]]:
    """Return the line and the number of words of each sentence."""
    found, start = [], 0
    ends = sorted({*(each.start() for each in _BREAK.finditer(text)), *(each.start() for each in _END.finditer(text))})
    for end in [*ends, len(text)]:
        words = len(re.findall(r"[^\W_][\w'.-]*", text[start:end]))
        if words > 2:
            lead = len(text[start:end]) - len(text[start:end].lstrip())
            found.append((text.count("\n", 0, start + lead) + 1, words))
        start = end
    return found


def check(path: Path) -> list[str]:
    """Return what is wrong with the prose of a file, a line for each."""
    source = path.read_text(encoding="utf-8")
    if path.suffix in (".py", ".j2"):
        text = strings_of(source) if path.suffix == ".py" else _TAG.sub(_blank, source)
        return [f"{path}:{line}: {said}" for line, said in sorted(complaints(text))]
    text = cells_of(source) if path.suffix == ".ipynb" else source
    lengths, limits = sentences(prose_of(text)), RULES["sentences"]
    said = [f"{path}:{line}: {what}" for line, what in sorted(complaints(words_of(text)))]
    said += [f"{path}:{line}: a sentence of {words} words" for line, words in lengths if words > limits["longest"]]
    mean = statistics.fmean([words for _, words in lengths]) if lengths else 0
    return said + [f"{path}: {mean:.1f} words a sentence, on average; at most {limits['mean']}"] * (
        mean > limits["mean"]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Check pages and package, or the files that are given, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.prose", description=__doc__)
    parser.add_argument("files", type=Path, nargs="*", help="pages, notebooks, templates or Python files")
    files = parser.parse_args(arguments).files or [path for each in PAGES + PACKAGE for path in sorted(ROOT.glob(each))]
    said = [line for path in files for line in check(path)]
    for line in said:
        complain(line)
    return FAILURE if said else DONE


if __name__ == "__main__":
    sys.exit(main())
