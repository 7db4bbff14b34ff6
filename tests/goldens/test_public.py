"""What others build on: the command line, names with their signatures, configurations of presets, and protocols."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterator
from typing import Any, get_args, is_typeddict

import pytest
import typer
from support.commands import ROOT, call
from syrupy.assertion import SnapshotAssertion
from typer import rich_utils

import elfatt_sd
import elfatt_sd.visualize
from elfatt_sd.cli import app
from elfatt_sd.config import PRESETS
from elfatt_sd.evaluation.protocols import load_protocol

LISTED = re.compile(r"^::: (.+)\.(\w+)$(?:\n    options:\n      members: (.+))?", re.MULTILINE)
API = LISTED.findall((ROOT / "docs" / "api.md").read_text(encoding="utf-8"))
MEMBERS = {name: re.findall(r"\w+", members) for _, name, members in API if members}  # of others, all


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of a command and of all those in it."""
    yield words
    for name in command.list_commands(None) if hasattr(command, "list_commands") else ():
        yield from commands(command.get_command(None, name), (*words, name))


def test_helps_are_unchanged(snapshot: SnapshotAssertion, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MAX_WIDTH", 120), ("FORCE_TERMINAL", None), ("COLOR_SYSTEM", None)):
        monkeypatch.setattr(rich_utils, name, value)
    shown = [call(*words, "--help").stdout for words in commands(typer.main.get_command(app))]
    assert "\n".join(line.rstrip() for text in shown for line in text.splitlines() if line.strip()) == snapshot


def described(name: str, found: Any) -> Iterator[str]:
    """A name with its signature, a class with the members that the page of the API shows, other values as they are."""
    if is_typeddict(found):
        yield from (f"{name}[{key!r}]: {kind.__forward_arg__}" for key, kind in sorted(found.__annotations__.items()))
    elif isinstance(found, type):
        yield f"class {name}({', '.join(base.__name__ for base in found.__bases__)}){signature(found)}"
        for member in MEMBERS.get(name, sorted(key for key in found.__dict__ if not key.startswith("_"))):
            value = getattr(found, member, None)
            if inspect.isroutine(value) or isinstance(value, property):
                yield f"  {type(found.__dict__[member]).__name__} {member}{signature(value)}"
    else:
        yield f"{name}{signature(found)}" if inspect.isroutine(found) else f"{name} = {get_args(found) or found!r}"


def signature(found: Any) -> str:
    try:
        return str(inspect.signature(found))
    except (TypeError, ValueError):
        return ""


def test_names_and_signatures_are_unchanged(snapshot: SnapshotAssertion) -> None:
    """Those of the package's root, and those that the page of the API lists, wherever they live."""
    homes = [(home, name) for home in (elfatt_sd, elfatt_sd.visualize) for name in home.__all__]
    homes += [(importlib.import_module(module), name) for module, name, _ in API]
    found = {name: getattr(home, name) for home, name in homes}
    listed = [f"{home.__name__}: {', '.join(sorted(home.__all__))}" for home in (elfatt_sd, elfatt_sd.visualize)]
    assert "\n".join([*listed, *(line for name in sorted(found) for line in described(name, found[name]))]) == snapshot


def test_what_the_api_lists_says_what_it_takes() -> None:
    """Elsewhere a docstring is a line that says what the name does not, or none."""
    for module, name, _ in API:
        found = getattr(importlib.import_module(module), name)
        if inspect.isroutine(found):
            parts = inspect.signature(found).parameters
            assert [
                each for each in parts if not re.search(rf"^\s*\**{each}: ", str(found.__doc__), re.MULTILINE)
            ] == []
        for member in ("__doc__", *MEMBERS.get(name, ())) if isinstance(found, type) else ():
            assert member == "false" or getattr(found, member).__doc__, f"{name}.{member}"


def test_presets_are_unchanged(snapshot: SnapshotAssertion) -> None:
    assert "\n".join(json.dumps(config.to_dict()) for config in PRESETS.values()) == snapshot


def test_identities_of_protocols_are_unchanged(snapshot: SnapshotAssertion) -> None:
    """Runs that are there already go on under them."""
    shipped = [load_protocol(path) for path in sorted((ROOT / "eval").glob("*.toml"))]
    assert "\n".join(f"{each.name}: {len(each.cells)} rows, {each.identity}" for each in shipped) == snapshot
