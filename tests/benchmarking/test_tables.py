"""Tables say each thing once: what all rows share above them, what names mean below them."""

from __future__ import annotations

from typing import Any

import pytest

from elfatt_sd.benchmarking.names import legend
from elfatt_sd.benchmarking.tables import clock, markdown, profile_cells


def test_kernels_have_names_that_fit_a_table() -> None:
    """Without namespaces and template arguments; variants of one kernel are one name."""
    seen = [f"void cudnn::kernels::{'long_' * 12}name_{size}" for size in (64, 128)]
    long = "void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<c10::Half>(long, c10::Half)"
    figures = {"host": 1.0, "device": 1.0, "wall": 1.0, "kernels": 3, "attention": seen, "longest": [[long, 0.5, 1]]}
    attention, longest = profile_cells([{"size": 512, "batch": 2, "method": "untouched", **figures}])[1][-2:]
    assert attention == f"`{'long_' * 12}`"
    assert longest.startswith("`RowwiseMomentsCUDAKernel` ")


def ratio(value: float) -> dict[str, float]:
    return {"median": value, "min": value, "max": value}


def row(method: str, **changes: Any) -> dict[str, Any]:
    timing = {
        "seconds": 41.1,
        "rounds": 5,
        "speed": {"untouched": ratio(1.5)},
        "floor": {"name": "floor", **ratio(1.2)},
    }
    return {
        "size": 512,
        "batch": 2,
        "method": method,
        **timing,
        "peak_bytes": None,
        "bytes_per_picture": None,
        **changes,
    }


def table(*rows: dict[str, Any], **results: Any) -> str:
    return markdown({"kind": "unet", "bases": ["untouched"], "groups": [], "rows": list(rows), **results})


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0012344, "1.234 ms"), (9.9994, "9999 ms"), (10.0, "10.0 s"), (412.34, "412.3 s")]
)
def test_seconds_from_ten_on(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_what_all_rows_share_stands_above() -> None:
    lines = table(row("a"), row("b")).splitlines()
    assert lines[:3] == [
        "512 pixels, batch 2:",
        "",
        "| method | time | times as fast as untouched | of its floor's time |",
    ]
    lines = table(row("a"), row("b", batch=4)).splitlines()
    assert lines[0] == "512 pixels:"
    assert lines[2].startswith("| batch | method |")


def test_an_untouched_phase_has_no_share_of_a_floor() -> None:
    timing = {"seconds": 1.0, "speed": {}, "floor": {"name": "floor", **ratio(1.7)}}
    parts = [{"variant": name, "steps": 25, "what": name, **timing} for name in ("untouched", "a/1")]
    exact, own = table(row("a", parts=parts)).splitlines()[5:7]
    assert exact == "| &nbsp; 25 steps: untouched | 1000 ms |  |  |"
    assert own == "| &nbsp; 25 steps: a/1 | 1000 ms |  | 1.700 |"


def test_the_spread_of_the_rounds_stands_in_brackets() -> None:
    speed = {"untouched": {"median": 1.5, "min": 1.25, "max": 2.0}}
    assert "| 1.50 (1.25 to 2.00) | 1.200 |" in table(row("a", speed=speed))


def test_exponents_of_fewer_sizes_say_so() -> None:
    rows = [row("a", tokens=tokens, part="layer") for tokens in (1, 2, 3)]
    rows += [row("b", tokens=tokens, part="layer") for tokens in (1, 2)]
    two = dict.fromkeys(("median", "min", "max"), 2.0)
    text = table(*rows, exponents={"layer": {"a": {"median": 1.0, "min": 0.9, "max": 1.1}, "b": two}})
    said = "Time of the layer grows with tokens to the power of: a 1.00 (0.90 to 1.10); b 2.00 (2 sizes)."
    assert said in text


def test_names_are_explained_where_they_occur() -> None:
    text = table(row("untouched"), row("elfatt:ratio=0"))
    assert text.splitlines()[-1] == legend({"untouched", "elfatt:ratio=0"})
    assert "`ratio=0` merges nothing" in text
    assert "`floor` leaves out" not in text
    assert "`floor` leaves out" in legend({"floor"})
    assert legend({"tome", "elfatt-fast"}) == ""
