"""The page on the architecture: its drawing is up to date, and what pages and docstrings name is there."""

from __future__ import annotations

import pkgutil
import re

import pytest

from tools import architecture
from tools.prose import PACKAGE, PAGES, ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
FILES = [path for pattern in (*PAGES, *PACKAGE) for path in ROOT.glob(pattern)]


def exists(name: str) -> bool:
    """Whether a dotted name is that of a module, or of something in one."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_the_drawing_is_up_to_date() -> None:
    said = "run python -m tools.architecture, look at the drawing, and commit it"
    assert architecture.FILE.read_text(encoding="utf-8") == architecture.draw(), said


def test_every_layer_is_drawn_with_its_line() -> None:
    names = [name for layer in architecture.layers() for name in layer]
    assert names[0] == "cli" and names[-1] == "errors" and len(names) == len(set(names))
    assert all(architecture.line_of_module(name) for name in names)


def test_a_class_that_is_gone_is_named() -> None:
    with pytest.raises(ValueError, match="no class Gone in elfatt_sd/runtime"):
        architecture.class_of("Gone")


@pytest.mark.parametrize(("file", "name"), re.findall(r"`([\w/]+\.py)`, `([\w.]+)`", PAGE))
def test_what_the_page_points_to_is_there(file: str, name: str) -> None:
    assert (ROOT / "elfatt_sd" / file).is_file()
    assert exists(f"elfatt_sd.{file.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}.{name}")
    text, first = (ROOT / "elfatt_sd" / file).read_text(encoding="utf-8"), name.partition(".")[0]
    assert re.search(rf"^(?:class |def )?{first}\b", text, re.MULTILINE), "it is imported from elsewhere"


def test_the_page_is_read_in_five_minutes() -> None:
    assert len(PAGE.splitlines()) <= 80 and len(PAGE.split()) <= 1200


def test_modules_and_files_that_are_named_exist() -> None:
    missing = []
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        dotted = set(re.findall(r"\belfatt_sd(?:\.[A-Za-z_]\w*)+", text))
        missing += [f"{path}: {name}" for name in dotted if not exists(name)]
        files = set(re.findall(r"(?<![\w/.-])(?:elfatt_sd|docs|tests)/[\w/-]+\.(?:py|md|json|toml)\b", text))
        missing += [f"{path}: {name}" for name in files if not (ROOT / name).exists()]
    assert missing == []
