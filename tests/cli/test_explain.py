"""`elfatt-sd generate --explain`: a PNG for each phase beside the image."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from support.commands import PROMPT, call, check_error, draw, files

pytestmark = pytest.mark.usefixtures("library_chatter")


def test_what_was_seen_is_written_beside_each_image(model: Path, tmp_path: Path) -> None:
    words = ["--method", "tome", "--num-images", 2, "--compare", "--step", 2]
    result = draw(model, tmp_path / "one", *words, "--explain")
    written = [name for name in files(tmp_path / "one") if "explained" in name]
    assert written == ["0001-a-red-star-explained-step-2.png", "0002-a-red-star-explained-step-2.png"]
    assert all(str(tmp_path / "one" / name) in result.stdout for name in written)
    with Image.open(tmp_path / "one" / written[0]) as image:
        assert image.width > 1000


def test_several_layers_have_files_of_their_own(model: Path, tmp_path: Path) -> None:
    draw(model, tmp_path, "--method", "tome", "--explain", "--layer", "up_blocks.*", "--step", 1, "--at", "0.1,0.9")
    written = [name for name in files(tmp_path) if "explained" in name]
    assert written[0] == "0001-a-red-star-explained-layer-1-step-1.png" and len(written) > 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--explain", "--method", "sd"], "method='sd' changes nothing to explain"),
        (["--explain", "--at", "1,2"], "at="),
        (["--explain", "--at", "middle"], "at="),
        (["--explain", "--step", "0"], "step=0"),
    ],
)
def test_wrong_use_is_one_line(model: Path, tmp_path: Path, words: list[str], says: str) -> None:
    check_error(call("generate", PROMPT, "--model", model, "--out", tmp_path, *words), says)
