"""What is prose in a page and in a module, and what the linter says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import prose

PAGE = """# A picture

Two `pictures` are here. See [them](pictures.md).

```
a picture
```

- One picture
  is beside another one. It is so.
"""


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The project's own word list, without proselint."""
    monkeypatch.setattr(prose, "_proselint", lambda text: iter(()))


def test_code_and_links_hold_no_words_and_titles_and_tables_no_sentences() -> None:
    page = PAGE + "| picture | `picture` |\n"
    for text, pictures in ((prose.words_of(page), 3), (prose.prose_of(page), 1)):
        assert text.count("\n") == page.count("\n")
        assert text.count("picture") == pictures


def test_sentences_are_counted_with_their_lines() -> None:
    assert prose.sentences(prose.prose_of(PAGE)) == [(3, 4), (9, 6), (10, 3)]


@pytest.mark.usefixtures("alone")
def test_words_of_the_list_are_named_with_better_ones(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    said = [line.removeprefix(f"{page}:") for line in prose.check(page)]
    better = ["1: 'picture'; better: image", "9: 'picture'; better: image"]
    assert said == [*better, "10: 'beside'; better: compared with, or: with"]
    page.write_text("word " * 50)
    assert [line.split(": ")[1][:10] for line in prose.check(page)] == ["a sentence", "50.0 words"]


@pytest.mark.usefixtures("alone")
def test_docstrings_and_messages_are_read_and_code_is_not(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    code = 'picture = {"picture": 1}\n\n\ndef f(picture):\n    """Draw it.\n\n    As a picture of `picture`.\n\n'
    module.write_text(code + '    Args:\n        picture: the very one.\n    """\n    return f"no picture {picture}"\n')
    better = [(7, "'picture'; better: image"), (10, "'the very'; better: the same"), (12, "'picture'; better: image")]
    assert prose.check(module) == [f"{module}:{line}: {said}" for line, said in better]
    module.write_text(f'RESIZE = "{prose.RULES["kept"]["strings"][0]}"\n')
    assert not prose.check(module), "an old file has these words in a hash"


@pytest.mark.usefixtures("alone")
def test_cells_of_notebooks_and_the_text_of_templates_are_read(tmp_path: Path) -> None:
    notebook, template = tmp_path / "a.ipynb", tmp_path / "a.html.j2"
    cells = [("code", "picture"), ("markdown", "# A picture\n\nIt is a picture.")]
    notebook.write_text(json.dumps({"cells": [{"cell_type": kind, "source": [text]} for kind, text in cells]}))
    assert prose.check(notebook) == [f"{notebook}:{line}: 'picture'; better: image" for line in (1, 3)]
    template.write_text('<a id="picture">{{ picture(1) }}{% if\npicture %}</a>\nA picture\n')
    assert prose.check(template) == [f"{template}:3: 'picture'; better: image"]


@pytest.mark.usefixtures("alone")
def test_a_negation_is_of_the_verb(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("It is no image. There is no image. It is no longer one. They are no more than two.\n")
    assert prose.check(page) == [f"{page}:1: 'is no '; better: is not a"]


def test_pages_and_package_are_plain(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("proselint")
    assert prose.main([]) == 0, capsys.readouterr().err
