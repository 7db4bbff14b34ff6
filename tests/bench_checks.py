"""What every benchmark is given and has to save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from elfatt_sd.benchmarking.plots import save
from elfatt_sd.benchmarking.record import Results
from elfatt_sd.benchmarking.tables import clock

QUICK: dict[str, Any] = {"repeats": 1, "device": "cpu"}


def check_saved(results: Results, folder: Path) -> None:
    """JSON that reads back, a table row for each, a picture."""
    path = folder / "x.json"
    path.write_text(json.dumps(results))
    _, table, plot = save(results, path)
    lines = [line for line in table.read_text().splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    for row in results["rows"]:
        assert any(f"| {row['method']} | {clock(row['seconds'])} |" in line for line in lines)
    assert plot.read_bytes().startswith(b"\x89PNG")
