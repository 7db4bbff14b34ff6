"""The drawing of docs/architecture.md: `python -m tools.architecture`.

Its words are the contract of layers in pyproject.toml, and the first lines of the docstrings of modules and classes.
"""

from __future__ import annotations

import ast
import html
import textwrap
import tomllib
from pathlib import Path

from elfatt_sd.evaluation.report.charts import BASE, INK, METHODS, PAPER
from elfatt_sd.files import write_file

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "images" / "architecture.svg"
RUNTIME = "runtime"
CALL = {  # what a call of a patched denoiser comes through, and why it goes there
    "Patch": "a hook before the model's forward",
    "Schedule": "which step is it?",
    "Run": "which pass over the schedule does it continue?",
    "Memory": "what did earlier steps keep?",
    "Call": "what do its layers share?",
    "PatchedLayer": "the model calls each layer",
    "LayerCall": "which phase, which grid?",
    "ElfattProcessor": "exact, or approximate",
}
_LEFT, _NAME, _RIGHT, _WIDTH, _TOP = 10, 156, 600, 1000, 44  # pixels
_LINE = 13


def layers() -> list[list[str]]:
    """Return the modules of each layer, from the top down."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]
    found = next(contract["layers"] for contract in tools["importlinter"]["contracts"] if contract["type"] == "layers")
    return [layer.split(" : ") for layer in found]


def line_of_module(name: str) -> str:
    """Return the first line of the docstring of a module or folder in the root of the package."""
    path = ROOT / "elfatt_sd" / name
    return _line(ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text("utf-8")))


def class_of(name: str) -> tuple[str, str]:
    """Return the file in the folder `runtime` that defines a class, and the first line of its docstring."""
    for path in sorted((ROOT / "elfatt_sd" / RUNTIME).glob("*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return path.name, _line(node)
    raise ValueError(f"no class {name} in elfatt_sd/{RUNTIME}; change CALL in tools/architecture.py.")


def _line(node: ast.Module | ast.ClassDef) -> str:
    return (ast.get_docstring(node) or "").partition("\n")[0]


def draw() -> str:
    """Return the drawing as SVG."""
    parts = [_text(_LEFT, 24, "Layers: imports point down", 15, bold=True)]
    bottom = _TOP
    for names in layers():
        top = bottom
        for name in names:
            said = textwrap.wrap(line_of_module(name), 76)
            parts.append(_text(_LEFT + 10, bottom + 17, name, 12, bold=True))
            parts += _lines(_LEFT + 112, bottom + 17, said)
            bottom += len(said) * _LINE + 6
        parts.append(_box(_LEFT, top, _RIGHT - 30 - _LEFT, bottom + 6 - top, marked=names == [RUNTIME]))
        bottom += 16
    parts.append(_text(_RIGHT, 24, "The life of a call: elfatt_sd/runtime", 15, bold=True))
    step = (bottom - _TOP) // len(CALL)
    for place, (name, why) in enumerate(CALL.items()):
        y, (file, text) = _TOP + step * place, class_of(name)
        length = step - 28 if place else 22  # from the box above
        parts.append(f'<path d="M{_RIGHT + 6} {y + 18 - length}v{length}" stroke="{INK}" marker-end="url(#end)"/>')
        parts += [_text(_RIGHT + 16, y + 12, why, 11), _box(_RIGHT, y + 20, _NAME, 26, marked=True)]
        parts.append(_text(_RIGHT + 10, y + 37, name, 12))
        parts.append(_text(_RIGHT + _NAME + 10, y + 30, file, 11, bold=True))
        parts += _lines(_RIGHT + _NAME + 10, y + 30 + _LINE, textwrap.wrap(text, 38))
    head = '<marker id="end" orient="auto" markerWidth="8" markerHeight="8" refX="7" refY="4">'
    head += f'<path d="M0 0 8 4 0 8" fill="none" stroke="{INK}"/></marker>'
    size = f'width="{_WIDTH}" height="{bottom + 8}" viewBox="0 0 {_WIDTH} {bottom + 8}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">\n<defs>{head}</defs>'
    return "\n".join([start, f'<rect width="100%" height="100%" fill="{PAPER}"/>', *parts, "</svg>\n"])


def _box(x: float, y: float, width: float, height: float, *, marked: bool) -> str:
    place = f'x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}"'
    return f'<rect {place} rx="5" fill="none" stroke="{METHODS[0] if marked else BASE}"/>'


def _lines(x: float, y: float, lines: list[str]) -> list[str]:
    return [_text(x, y + _LINE * place, line, 11) for place, line in enumerate(lines)]


def _text(x: float, y: float, said: str, size: int, *, bold: bool = False) -> str:
    style = f'font-size="{size}" fill="{INK}"' + ' font-weight="bold"' * bold
    return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{html.escape(said)}</text>'


if __name__ == "__main__":
    write_file(FILE, draw().encode())
