"""What others register, and models of another family, get rows of an evaluation without touching the package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import small_run
import tiny_pixart
import torch

from elfatt_sd.evaluation.generate import generate
from elfatt_sd.evaluation.protocols import Protocol, load_protocol
from elfatt_sd.evaluation.run import Run
from elfatt_sd.evaluation.stages import evaluate

OWN = """
[[cells]]
label = "own"
method = "someones_own:Values"
factor = [0.5, 2.0]
"""


def hashes(run: Run) -> dict[str, list[str]]:
    return {row.name: [made.sha256 for made in row.made_images()] for row in run.rows}


def test_a_class_in_a_protocol_gets_a_row_for_each_setting(module: str, tmp_path: Path, model: Path) -> None:
    protocol = load_protocol(small_run.write_protocol(tmp_path, model, small_run.UNTOUCHED + OWN))
    names = ["someones_own-Values-factor0.5", "someones_own-Values-factor2.0"]
    assert [cell.name for cell in protocol.cells[-2:]] == names
    assert [cell.config().phases[0].attention for cell in protocol.cells[-2:]] == [
        sys.modules["someones_own"].Values(factor) for factor in (0.5, 2.0)
    ]
    assert Protocol.from_dict(protocol.to_dict()).identity == protocol.identity
    run = Run(tmp_path / "run", protocol)
    assert generate(run, show_progress=False) == {}
    made = hashes(run)
    assert len({tuple(found) for found in made.values()}) == len(made)


def test_a_pixart_pipeline_gets_its_images(tmp_path: Path) -> None:
    tiny_pixart.pixart(tmp_path / "parts").save_pretrained(tmp_path / "pixart")
    cells = small_run.UNTOUCHED + '[[cells]]\nmethod = "elfatt-fast"\nblock_size = 4\nactive_fraction = 1\n'
    protocol = load_protocol(small_run.write_protocol(tmp_path, tmp_path / "pixart", cells))
    run = Run(tmp_path / "run", protocol)
    with torch.random.fork_rng():
        assert generate(run, show_progress=False) == {}
    untouched, _, fast = hashes(run).values()
    assert len(untouched) == len(fast) == 5
    assert not set(untouched) & set(fast)


@pytest.mark.parametrize("family", ["unet", "pixart"])
def test_they_go_through_every_stage(
    family: str, module: str, workplace: Path, shared_cache: None, in_process: None, tmp_path: Path
) -> None:
    """Timed, measured, scored, and in the report's table under their names."""
    model = workplace / "sd15"
    if family == "pixart":
        model = tmp_path / "pixart"
        tiny_pixart.pixart(tmp_path / "parts").save_pretrained(model)
    path = small_run.write_protocol(tmp_path, model, small_run.UNTOUCHED + OWN)
    run = Run(tmp_path / "run", load_protocol(path, small_run.full_overrides(workplace)))
    assert evaluate(run, lambda line: None, show_progress=False) == {}
    table = (tmp_path / "run" / "report" / "table.md").read_text()
    assert {line.split("|")[2].strip() for line in table.splitlines() if line.startswith("| own")} == {"0.5", "2"}
