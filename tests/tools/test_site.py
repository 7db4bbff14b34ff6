"""The site has every page, in a place that its menu names, and loads nothing from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import elfatt_sd
from elfatt_sd import visualize
from tools.site import SHIM, on_post_page, page_files

ROOT = Path(__file__).parents[2]


def named(menu: object) -> set[str]:
    """The pages of a menu, at any depth."""
    if isinstance(menu, str):
        return {menu}
    parts = menu.values() if isinstance(menu, dict) else menu
    return set().union(*map(named, parts))  # type: ignore[arg-type]


def test_the_menu_names_every_page_for_readers() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    pages = {path.as_posix() for path in page_files(ROOT)}
    menu = named(config["nav"])
    assert menu <= pages
    assert {page for page in pages if page.startswith("docs/") and page.endswith(".md")} <= menu


def test_the_api_page_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    for module in (elfatt_sd, visualize):
        for name in set(module.__all__) - {"__version__"}:
            assert re.search(rf"^::: elfatt_sd\.\S+\.{name}$", page, re.MULTILINE), name


def test_nothing_is_loaded_from_elsewhere() -> None:
    page = SimpleNamespace(url="docs/start.html")
    own = on_post_page(f'<script src="{SHIM}"></script><a href="https://example.org">link</a>', page, None)
    assert '<script src="worker.js">' in own
    for foreign in ('<img src="https://example.org/x.png">', "<script src=//cdn.example.org/x.js>"):
        with pytest.raises(ValueError, match=r"docs/start.html loads from elsewhere"):
            on_post_page(foreign, page, None)
