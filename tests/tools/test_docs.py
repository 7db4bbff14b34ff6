"""Pages, drawings and prose say what is there, in plain words; sizes are counted."""

from __future__ import annotations

import json
import pkgutil
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import elfatt_sd
from elfatt_sd import visualize
from elfatt_sd.config import METHODS
from elfatt_sd.evaluation.report.charts import drawing
from tools import architecture, prose, size
from tools.drawings import draw_phases, main
from tools.prose import PACKAGE, PAGES, ROOT
from tools.site import SHIM, on_post_page, page_files

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
FILES = [path for pattern in (*PAGES, *PACKAGE) for path in ROOT.glob(pattern)]


def named(menu: object) -> set[str]:
    """The pages of a menu, at any depth."""
    if isinstance(menu, str):
        return {menu}
    parts = menu.values() if isinstance(menu, dict) else menu
    return set().union(*map(named, parts))  # type: ignore[arg-type]


def test_the_menu_and_the_api_page_name_everything_for_readers() -> None:
    pages = {path.as_posix() for path in page_files(ROOT)}
    menu = named(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert {page for page in pages if page.startswith("docs/") and page.endswith(".md")} <= menu <= pages
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


def exists(name: str) -> bool:
    """Whether a dotted name is that of a module, or of something in one."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_the_architecture_is_drawn_and_what_its_page_points_to_is_there() -> None:
    said = "run python -m tools.architecture, look at the drawing, and commit it"
    assert architecture.FILE.read_text(encoding="utf-8") == architecture.draw(), said
    names = [name for layer in architecture.layers() for name in layer]
    assert names[0] == "cli" and names[-1] == "errors" and len(names) == len(set(names))
    assert all(architecture.line_of_module(name) for name in names)
    with pytest.raises(ValueError, match="no class Gone in elfatt_sd/runtime"):
        architecture.class_of("Gone")
    for file, name in re.findall(r"`([\w/]+\.py)`, `([\w.]+)`", PAGE):
        assert exists(f"elfatt_sd.{file.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}.{name}"), name
        text, first = (ROOT / "elfatt_sd" / file).read_text(encoding="utf-8"), name.partition(".")[0]
        assert re.search(rf"^(?:class |def )?{first}\b", text, re.MULTILINE), f"{name} is imported from elsewhere"
    assert len(PAGE.splitlines()) <= 80 and len(PAGE.split()) <= 1200, "it is read in five minutes"


def test_modules_and_files_that_are_named_exist() -> None:
    missing = []
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        dotted = set(re.findall(r"\belfatt_sd(?:\.[A-Za-z_]\w*)+", text))
        missing += [f"{path}: {name}" for name in dotted if not exists(name)]
        files = set(re.findall(r"(?<![\w/.-])(?:elfatt_sd|docs|tests)/[\w/-]+\.(?:py|md|json|toml)\b", text))
        missing += [f"{path}: {name}" for name in files if not (ROOT / name).exists()]
    assert missing == []


def test_drawings_say_what_the_presets_are(tmp_path: Path) -> None:
    with drawing():
        axes = draw_phases().axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [name for name in METHODS if name != "sd"]
    said = [text.get_text() for text in axes.texts]
    assert said[0] == "merged" and "exact" in said and said[-1] == "sampled keys, 1 step of 4 exact"
    main([str(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["layer.png", "phases.png"]


TEXT = """# A picture

Two `pictures` are here. See [them](pictures.md).

```
a picture
```

- One picture
  is beside another one. It is so.

| picture | `picture` |
"""
MODULE = '''picture = {"picture": 1}


def f(picture):
    """Draw it.

    As a picture of `picture`.

    Args:
        picture: the very one.
    """
    return f"no picture {picture}"
'''
CELLS = [("code", "picture"), ("markdown", "# A picture\n\nIt is a picture.")]
NOTEBOOK = json.dumps({"cells": [{"cell_type": kind, "source": [text]} for kind, text in CELLS]})
BETTER = "'picture'; better: image"
BESIDE = "10: 'beside'; better: compared with, or: with"
NO = "It is no image. There is no image. It is no longer one. They are no more than two.\n"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("page.md", TEXT, [f"1: {BETTER}", f"9: {BETTER}", BESIDE, f"12: {BETTER}"]),
        ("module.py", MODULE, [f"7: {BETTER}", "10: 'the very'; better: the same", f"12: {BETTER}"]),
        ("module.py", f'RESIZE = "{prose.RULES["kept"]["strings"][0]}"\n', []),  # an old file has it in a hash
        ("a.ipynb", NOTEBOOK, [f"1: {BETTER}", f"3: {BETTER}"]),
        ("a.html.j2", '<a id="picture">{{ picture(1) }}{% if\npicture %}</a>\nA picture\n', [f"3: {BETTER}"]),
        ("page.md", NO, ["1: 'is no '; better: is not a"]),
        ("page.md", "word " * 50, ["1: a sentence of 50 words", " 50.0 words a sentence, on average"]),
    ],
)
def test_words_of_the_list_are_named_with_better_ones(
    name: str, text: str, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code and links hold no words; titles and tables no sentences."""
    monkeypatch.setattr(prose, "_proselint", lambda text: iter(()))
    (tmp_path / name).write_text(text)
    found = [line.removeprefix(f"{tmp_path / name}:") for line in prose.check(tmp_path / name)]
    assert [line[: len(start)] for line, start in zip(found, said, strict=True)] == said
    assert prose.sentences(prose.prose_of(TEXT)) == [(3, 4), (9, 6), (10, 3)]


def test_pages_and_package_are_plain(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("proselint")
    assert prose.main([]) == 0, capsys.readouterr().err


SOURCE = '''"""A module.

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
    "package_lines": 18, "package_files": 3, "test_lines": 1, "test_files": 1, "root_modules": 2, "functions": 2,
    "short_functions_percent": 50.0,
    "docstrings_percent": 33.3,  # 6 of 18
    "raises_in_1000_lines_of_code": 142.9,  # 1 of 7
    "longest_file": 17,
}  # fmt: skip


def test_sizes_are_counted_and_what_passes_its_ceiling_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"elfatt_sd/__init__.py": "", "elfatt_sd/a.py": SOURCE, "elfatt_sd/b/c/d.py": "x = 1\n"}
    for name, text in {**files, "tests/test_a.py": "x = 1\n", "tools/e.py": "x = 1\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for passed in ("", *FOUND):
        ceilings = [f"{name} = {value - 0.1 * (name == passed)}" for name, value in FOUND.items()]
        (tmp_path / "pyproject.toml").write_text("\n".join(["[tool.elfatt.size]", *ceilings]))
        code = size.main(["--check"] if passed else [], tmp_path)
        said, error = capsys.readouterr()
        if passed:
            assert (code, said) == (1, "") and error.startswith(f"error: {passed} is {FOUND[passed]}, more than ")
        else:
            lines = [line.split() for line in said.splitlines()]
            assert code == 0 and {name.rstrip(","): float(value) for value, name, *_ in lines[5:]} == FOUND
            assert [" ".join(line) for line in lines[:2]] == [
                "18 lines in 3 files elfatt_sd",
                "1 lines in 1 files elfatt_sd/b",
            ]
