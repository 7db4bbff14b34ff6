"""The doctor: it looks at everything, survives what is broken, and knows what is needed."""

from __future__ import annotations

import importlib.metadata
import json
from typing import Any

import pytest
import torch
from support.commands import call

from elfatt_sd import errors as optional
from elfatt_sd.attention import softmax as attention
from elfatt_sd.drawing import doctor
from elfatt_sd.errors import OptionalPackage

pytestmark = pytest.mark.usefixtures("library_chatter")


def test_a_working_machine_is_healthy() -> None:
    result = call("doctor", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    data = json.loads(result.stdout)
    assert data.pop("healthy") is True
    assert list(data) == ["machine", "needed packages", "optional packages", "self-check"]
    assert {"torch", "diffusers", "transformers"} <= {finding["name"] for finding in data["needed packages"]}
    assert {"name", "value", "status", "remedy"} == set(data["self-check"][0])


def test_what_is_missing_or_old_names_its_install_line(monkeypatch: Any) -> None:
    lines = [
        "torch>=9999",
        "no-such-package",
        "diffusers>=0.32.1",
        "nope>=1; extra == 'dev'",
        "a; python_version < '3'",
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
    absent = {"nothing": OptionalPackage("no_such", "it", "eval"), "alone": OptionalPackage("no_such", "it")}
    monkeypatch.setattr(optional, "PACKAGES", absent)
    monkeypatch.setattr(doctor, "PACKAGES", absent)
    sections = doctor.examine()
    found = [(each.name, each.status, each.remedy) for each in sections["needed packages"]]
    assert found == [
        ("torch", "missing", "pip install 'torch>=9999'"),
        ("no-such-package", "missing", "pip install 'no-such-package'"),
        ("diffusers", "ok", ""),
    ]
    assert [(each.status, each.remedy) for each in sections["optional packages"]] == [
        ("optional", "pip install 'elfatt-sd[eval]'"),
        ("optional", "pip install alone"),
    ]
    result = call("doctor")
    assert result.exit_code == 1 and "pip install 'no-such-package'" in result.stdout


def test_what_raises_is_a_finding_and_the_rest_is_still_shown(monkeypatch: Any) -> None:
    def broken() -> None:
        raise RuntimeError("the driver is gone\nand more")

    monkeypatch.setattr("elfatt_sd.devices.accelerators", broken)
    sections = doctor.examine()
    for name in ("machine", "self-check"):
        last = sections[name][-1]
        assert (last.value, last.status) == ("RuntimeError: the driver is gone", "missing")
    assert not doctor.healthy(sections) and len(sections["needed packages"]) > 3


def test_the_self_check_sees_a_wrong_attention(monkeypatch: Any) -> None:
    right = attention.elfatt_attention
    wrong = lambda q, *args, **kernel: right(q, *args, **kernel) * (1 + 1e-3 * (q.dtype == torch.float32))  # noqa: E731
    monkeypatch.setattr(attention, "elfatt_attention", wrong)
    assert next(doctor._self_check()).status == "missing"
