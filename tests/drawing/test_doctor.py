"""The doctor: it looks at everything, survives what is broken, and knows what is needed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from elfatt_sd import errors as optional
from elfatt_sd.attention import softmax as attention
from elfatt_sd.cli import app
from elfatt_sd.drawing import doctor
from elfatt_sd.drawing.doctor import Finding, attention_error, examine, healthy
from elfatt_sd.errors import OptionalPackage

pytestmark = pytest.mark.usefixtures("library_chatter")


def test_a_working_machine_is_healthy() -> None:
    sections = examine()
    assert list(sections) == [
        "machine",
        "needed packages",
        "optional packages",
        "attention backends",
        "self-check",
    ]
    assert healthy(sections), [finding for findings in sections.values() for finding in findings]
    found = {finding.name: finding for finding in sections["needed packages"]}
    assert {"torch", "diffusers", "transformers"} <= set(found)
    assert all(finding.remedy for findings in sections.values() for finding in findings if "needs " in finding.value)


def test_json_and_exit_codes(monkeypatch: Any) -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    data = json.loads(result.stdout)
    assert data["healthy"] is True
    assert {"name", "value", "status", "remedy"} == set(data["self-check"][0])
    monkeypatch.setattr(doctor, "_requirements", lambda: ["torch", "no-such-package-at-all"])
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "pip install 'no-such-package-at-all'" in result.stdout


def test_needed_versions_and_markers_count(monkeypatch: Any) -> None:
    lines = ["torch>=9999", "diffusers>=0.32.1", "nothing>=1; extra == 'dev'", "tomli; python_version < '3'"]
    monkeypatch.setattr(doctor, "_requirements", lambda: lines)
    old, fine = doctor._needed_packages()
    assert (old.name, old.status, old.remedy) == ("torch", "missing", "pip install 'torch>=9999'")
    assert (fine.name, fine.status) == ("diffusers", "ok")


def test_what_raises_is_a_finding_and_the_rest_is_still_shown(monkeypatch: Any) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError("weights are gone\nand more")

    monkeypatch.setattr(doctor, "_backends", broken)
    sections = examine()
    assert sections["attention backends"] == [Finding("attention backends", "OSError: weights are gone", "missing")]
    assert not healthy(sections)
    assert sections["self-check"][0].status == "ok"


def test_optional_things_do_not_make_a_machine_ill() -> None:
    assert healthy({"a": [Finding("x", "", "optional"), Finding("y", "", "info"), Finding("z", "", "ok")]})
    assert not healthy({"a": [Finding("x", "", "ok")], "b": [Finding("y", "", "missing")]})


def test_an_optional_package_that_is_not_there_names_its_install_line(monkeypatch: Any) -> None:
    absent = {
        "nothing": OptionalPackage("no_such_module", "nothing", "eval"),
        "alone": OptionalPackage("no_such", "it"),
    }
    monkeypatch.setattr(optional, "PACKAGES", absent)
    sections = examine()
    install = "pip install 'elfatt-sd[eval]'"
    assert sections["optional packages"] == [
        Finding("nothing", "for nothing", "optional", install),
        Finding("alone", "for it", "optional", "pip install alone"),
    ]
    assert install in CliRunner().invoke(app, ["doctor"]).stdout


def test_a_backend_that_is_not_there_names_its_install_line(monkeypatch: Any) -> None:
    pytest.importorskip("diffusers.models.attention_dispatch")
    monkeypatch.setattr(attention, "PACKAGES", {"flash": ("no_such_module", "pip install flash-attn")})
    *_, flash = doctor._backends()
    assert flash == Finding("flash", "needs no_such_module", "optional", "pip install flash-attn")


def test_the_self_check_sees_a_wrong_attention(monkeypatch: Any) -> None:
    assert attention_error("cpu") < doctor.TOLERANCE
    right = attention.elfatt_attention
    wrong = lambda q, *args, **kernel: right(q, *args, **kernel) * (1 + 1e-3 * (q.dtype == torch.float32))  # noqa: E731
    monkeypatch.setattr(attention, "elfatt_attention", wrong)
    assert attention_error("cpu") > doctor.TOLERANCE
    assert next(doctor._self_check()).status == "missing"
