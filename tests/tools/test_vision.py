"""The miniature on vision: what its scenes ask, runs that stop and go on, and their tables."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path

import pytest
import torch

from tools.vision import scenes, speed, training
from tools.vision.__main__ import main
from tools.vision.models import PLAIN, Labeller

WORDS = ["train", "--tables", "partners", "--rows", "local", "elfatt", "--seeds", "1", "--steps", "2", "--scenes", "40"]


@pytest.mark.parametrize("shift", [0, 2])
def test_partner_and_object_tell_the_answers_and_each_alone_nothing(shift: int) -> None:
    """What is read off the pixels gives all answers; without the object it gives half of them."""
    drawn = scenes.partners(64, torch.Generator().manual_seed(3), shift=shift)
    back = drawn.images.roll((-4 * shift, -4 * shift), (2, 3))
    squares = back.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 4, 5, 1)
    corner, below, centre = squares[..., 0, 0, :], squares[..., 1, 0, :], squares[..., 1, 1, :]
    read = (squares.amin((3, 4)), (corner - below).abs().amax(3) > 0.1, corner.mean(3) > centre.mean(3))
    tiles = (each.unflatten(2, (3, 4)).unflatten(1, (3, 4)).transpose(2, 3) for each in read)
    colour, direction, phase = (each.flatten(3, 4).flatten(1, 2) for each in tiles)
    partner = (torch.cdist(colour, colour) + 9 * torch.eye(16)).argmin(3)
    answers = torch.stack([each.gather(2, partner) for each in (direction, phase)]).long()
    answers = answers.view(2, 64, 3, 3, 4, 4).transpose(3, 4).reshape(2, 64, 12, 12)
    right = answers.roll((shift, shift), (2, 3)).flatten(2) == drawn.labels
    assert drawn.pattern is not None and drawn.scored.sum() > 64 * (16 if shift else 50)
    assert right[drawn.pattern, torch.arange(64)][drawn.scored].all()
    assert abs(right[0][drawn.scored].float().mean() - 0.5) < 0.1
    assert abs(drawn.labels[drawn.scored].float().mean() - 0.5) < 0.05


def test_elfatt_learns_what_windows_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which objects have the colour of the dotted one, which is in another window; a minute on a slow core."""
    table = dataclasses.replace(training.TABLES["matching"], draw=functools.partial(scenes.matching, side=32), side=32)
    monkeypatch.setitem(training.TABLES, "matching", table)
    effort = training.Effort(300, 300, torch.device("cpu"), float("inf"))
    rows = (training._trained(tmp_path, "matching", row, 0, effort) for row in ("local", "elfatt"))
    local, elfatt = (torch.tensor(row["scores"]["matching"]).mean() for row in rows)
    assert local < 0.55 < 0.65 < elfatt


def test_runs_go_on_and_tables_say_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ["--out", str(tmp_path), "--threads", str(torch.get_num_threads())]
    assert main([*WORDS, *own, "--minutes", "0"]) == 0 and not [*tmp_path.rglob("*.json")]
    assert main([*WORDS, *own]) == 0
    found = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    assert [path.parent.name for path in sorted(found)] == ["elfatt", "local"] and not [*tmp_path.rglob("*.pt")]
    monkeypatch.setattr(training, "train", lambda *_: pytest.fail("trained again"))
    assert main([*WORDS, *own]) == 0 and all(path.read_bytes() == content for path, content in found.items())
    monkeypatch.setitem(speed.SIZES, "sequence", (16, 32, 64))
    monkeypatch.setattr(speed, "ROUNDS", 1)
    monkeypatch.setattr(speed, "SHORTEST", 0.0)
    assert main(["speed", "--models", "sequence", *own]) == 0
    page = tmp_path / "vision.md"
    (tmp_path / "images").mkdir()
    blocks = ("partners", "heads", "sequence", "vit")
    page.write_text("".join(f"<!-- vision {each} -->\n<!-- end -->\n" for each in blocks))
    assert main(["table", "--out", str(tmp_path), "--page", str(page)]) == 0
    partners, heads, sequence, vit, _ = page.read_text().split("<!-- end -->")
    assert re.findall(r"`(.*?)` \| (\d*).*? \| (\d*)", heads)[0][:1] == ("elfatt",) and "| `local` |  | " in heads
    exact = training.head_errors(Labeller("softmax", PLAIN, 12, 2, 2), torch.randn(2, 3, 48, 48))
    assert exact == {"local": [0.0] * 3}, "which is what it is compared with"
    assert "| `softmax` | not yet run |" in partners and "not yet run" in vit
    assert re.search(r"`local` \| \d+\.\d \(\d+\.\d\) \| [+-]\d+\.\d \([+-].* to .*\), no difference shown", partners)
    assert len(re.findall(r"`elfatt` \|(?: [\d.]+ ms \|){3} -?\d\.\d\d \| \d+\.\d\d at 64 \|", sequence)) == 2
    assert main(["table", "--out", str(tmp_path / "missing"), "--page", str(page)]) == 2
