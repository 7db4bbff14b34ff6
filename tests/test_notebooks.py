"""The notebooks as they are committed: the quickstart has its pictures, and no output says where it was executed."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from elfatt_sd.drawing.pictures import fault_of
from elfatt_sd.toy.renderer import unknown_words

FOLDER = Path(__file__).parents[1] / "notebooks"
QUICKSTART = FOLDER / "1-quickstart.ipynb"


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def outputs(path: Path) -> list[dict[str, Any]]:
    return [output for cell in code_cells(path) for output in cell["outputs"]]


def test_the_quickstart_shows_its_pictures() -> None:
    """After a change: `make quickstart`."""
    cells = code_cells(QUICKSTART)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    encoded = [output["data"]["image/jpeg"] for output in outputs(QUICKSTART) if "image/jpeg" in output.get("data", {})]
    pictures = [Image.open(io.BytesIO(base64.b64decode(data))) for data in encoded]
    assert [picture.width // 256 for picture in pictures] == [1, 2, 6, 2]
    assert not any(fault_of(np.asarray(picture.convert("RGB"), dtype=float)) for picture in pictures)
    assert QUICKSTART.stat().st_size < 400_000


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_prompts_have_words_that_the_toy_knows(path: Path) -> None:
    code = "".join("".join(cell["source"]) for cell in code_cells(path))
    for prompt in re.findall(r'"(an? [^"]+ background)"', code):
        assert not unknown_words(prompt), prompt


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_outputs_hold_no_error_no_warning_and_no_place(path: Path) -> None:
    for output in outputs(path):
        assert output["output_type"] != "error"
        assert output.get("name") != "stderr"
        text = json.dumps([output.get("text"), output.get("data", {}).get("text/plain")])
        assert not re.search(r"warning|(^|[\s'\"(=])(~|file:/)?/\w", text, re.IGNORECASE), text
