"""What the command that runs diffusers' own tests says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elfatt_sd.errors import ElfattError
from tools.diffusers_tests import Comparison, Ending, main, read_endings, report
from tools.diffusers_tests_plugin import failure_kind


@pytest.mark.parametrize(
    ("error", "statement", "kind"),
    [
        (AssertionError(), "assert np.abs(image_slice.flatten() - expected_slice).max() < 1e-2", "value"),
        (AssertionError("0.3 not less than 0.001"), "self.assertLess(max_diff, expected_max_diff)", "value"),
        (AssertionError("Tensor-likes are not close!"), "torch.testing.assert_close(a, b)", "value"),
        (AssertionError(), "assert image.shape == (1, 64, 64, 3)", "structural"),
        (AssertionError("shape mismatch"), "np.testing.assert_allclose(a, b)", "structural"),
        (ElfattError("close"), "pipe(**inputs)", "structural"),
    ],
)
def test_kinds_of_failures(error: Exception, statement: str, kind: str) -> None:
    assert failure_kind(error, statement) == kind


def test_failures_are_told_apart(tmp_path: Path, capsys: Any) -> None:
    """Of tests that pass untouched; one that was killed in the middle, or never begun, is a structural failure."""
    lines = [f'{{"test": "tests/lora/{test}", "when": "{when}", "outcome": "{outcome}", "patched": 1{kind}}}'
             for test, when, outcome, kind in (
        ("passes", "setup", "passed", ""), ("passes", "call", "passed", ""), ("skips", "setup", "skipped", ""),
        ("type", "call", "failed", ', "kind": "structural", "message": "TypeError"'), ("killed", "setup", "passed", ""),
        ("values", "call", "failed", ', "kind": "value", "message": "0.3"'), ("values", "teardown", "passed", ""),
        ("known", "call", "failed", ', "kind": "value", "message": "0.4"'),
    )]  # fmt: skip
    (tmp_path / "results.jsonl").write_text("\n".join(lines) + "\n")
    patched = read_endings(tmp_path / "results.jsonl")
    passing = dict.fromkeys([*patched, "tests/lora/never"], Ending("passed"))
    untouched = {**passing, "tests/lora/skips": Ending("skipped"), "tests/lora/broken": Ending("failed")}
    assert not report(Comparison(untouched, patched, ["*/known", "*/pass*"]))
    said = capsys.readouterr().out
    assert ["LoRA", "8", "6", "5", "1", "2", "1", "3"] in [line.split() for line in said.splitlines()]
    assert "structural: TypeError\n    tests/lora/type\n" in said
    assert "see the log\n    tests/lora/killed\n    tests/lora/never\n" in said
    assert "values differ: 0.3\n    tests/lora/values\n" in said and "0.4" not in said
    assert "known, but its values are as expected: */pass*" in said
    few = {test: ending for test, ending in untouched.items() if test.endswith(("passes", "known"))}
    assert report(Comparison(few, patched, ["*/known"]))
    assert main(["--checkout", str(tmp_path)]) == 2  # it has no tests of UNets
