"""Layers are watched in runs of UNets and of transformers, with any attention; the images stay the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from support import tiny_pipelines as tiny
from support import tiny_transformers
from support.checks import runner

import elfatt_sd
from elfatt_sd.attention.softmax import softmax_attention
from elfatt_sd.config import PatchConfig, Phase
from elfatt_sd.errors import ElfattError
from elfatt_sd.methods import Attention
from elfatt_sd.visualize import Look, watch

UP = "up_blocks.*"


def look(pipe: Any, method: Any, run: Any, **asked: Any) -> list[Look]:
    """Watch a run, and check that its image is that of the same run without being watched."""
    elfatt_sd.apply_patch(pipe, method)
    expected = run()
    with watch(pipe, **asked) as looks:
        seen = run()
    assert torch.equal(seen, expected)
    elfatt_sd.remove_patch(pipe)
    for each in looks:
        for heads in each.heads:
            assert heads.exact.sum() + heads.exact_text == pytest.approx(1, abs=1e-4)
        assert sorted(number for heads in each.heads for number in heads.numbers) == list(range(len(all_heads(each))))
    return looks


def all_heads(each: Look) -> list[int]:
    return [number for heads in each.heads for number in heads.numbers]


@pytest.fixture
def run(pipe: Any) -> Any:
    pipe.scheduler = tiny.ddim()
    return runner(pipe)


def test_elfatt_shows_merges_agents_blocks_and_the_error(pipe: Any, run: Any) -> None:
    method = PatchConfig("own", (Phase(1.0, "elfatt", ratio=0.5, block_size=16, agents=8, block_order="windows"),))
    [seen] = look(pipe, method, run)
    assert (seen.step, seen.steps, seen.method) == (2, 4, "own")
    assert "agents" in seen.what
    assert seen.merged is not None and seen.merged.count == seen.grid.tokens - seen.grid.tokens // 2
    assert [agents.count for agents in seen.agents] == [8]
    through_agents, inside = seen.heads
    assert through_agents.seen.all() and through_agents.same_keys is None
    assert inside.same_keys is not None and 1 < len(set(inside.same_keys)) < seen.grid.tokens
    assert 0 < inside.seen.sum() < seen.grid.tokens
    same = inside.same_keys == inside.same_keys[seen.query]
    assert same[seen.query] and np.array_equal(inside.seen, same)
    for heads in seen.heads:
        assert heads.weights.sum() == pytest.approx(1, abs=1e-4)
    assert 0 < seen.relative_error < 2 and seen.error.shape == (seen.grid.tokens,)
    np.testing.assert_allclose(np.sqrt(np.mean(seen.error**2)), seen.relative_error, rtol=1e-6)


def test_blocks_are_put_back_in_the_grid(pipe: Any, run: Any) -> None:
    [seen] = look(pipe, PatchConfig("own", (Phase(1.0, "block", block_size=16, block_order="windows"),)), run)
    labels = seen.heads[0].same_keys
    assert labels is not None
    table = labels.reshape(seen.grid.rows, seen.grid.columns)
    for number in set(labels):
        rows, columns = np.nonzero(table == number)
        assert len(rows) == (np.ptp(rows) + 1) * (np.ptp(columns) + 1), "a block is a rectangle"


def test_every_phase_is_looked_at_and_merged_agents_are_shown(pipe: Any, run: Any) -> None:
    first, second = look(pipe, "agent", run)
    assert first.step < second.step
    assert first.agents and first.agents[0].count < seen_tokens(first)
    assert not second.agents and second.merged is not None


def seen_tokens(each: Look) -> int:
    return each.grid.tokens


def test_corrected_and_reused_outputs_are_compared_with_exact_ones(pipe: Any, run: Any) -> None:
    [corrected] = look(pipe, PatchConfig("own", (Phase(1.0, "block", block_size=8, residual_steps=2),)), run)
    assert corrected.step % 2 == 1
    [reused] = look(pipe, PatchConfig("own", (Phase(1.0, "reuse", residual_steps=2),)), run, step=2)
    assert reused.heads == () and 0 < reused.relative_error < 2


def test_layers_steps_and_points_are_chosen(pipe: Any, run: Any) -> None:
    looks = look(pipe, "tome", run, layer=UP, step=3, at=(0.0, 1.0))
    assert len(looks) > 1 and {each.step for each in looks} == {2}
    assert len({each.layer for each in looks}) == len(looks) and all(each.layer.startswith("up") for each in looks)
    assert all(each.query == each.grid.tokens - each.grid.columns for each in looks)


@dataclass(frozen=True)
class Neighbours(Attention):
    name: ClassVar[str] = "watched-neighbours"
    merges: ClassVar[bool] = False

    def attend(self, layer: Any, tokens: torch.Tensor, prepared: Any) -> torch.Tensor:
        halves = [x.chunk(2, dim=1) for x in layer.project(tokens)]
        return torch.cat([softmax_attention(*half, **layer.kernel) for half in zip(*halves, strict=True)], 1)

    def cost(self, size: Any) -> float:
        return size.tokens**2


def test_an_attention_of_somebody_else_is_shown(pipe: Any, run: Any) -> None:
    [seen] = look(pipe, Neighbours(), run)
    [heads] = seen.heads
    assert heads.same_keys is not None and len(set(heads.same_keys)) == 2
    assert heads.seen.sum() == seen.grid.tokens // 2


@pytest.mark.parametrize("kind", ["sd3", "flux", "wan"])
def test_layers_that_join_text_are_shown(kind: str, folder: Path) -> None:
    if kind == "flux":
        pipe = tiny_transformers.flux(folder)
        run = runner(pipe, height=64, width=64)
    else:
        pipe, run = getattr(tiny_transformers, kind)()
    elfatt_sd.remove_patch(pipe)
    looks = look(pipe, PatchConfig("own", (Phase(1.0, "sampled", keys=4),)), run)
    text = kind != "wan"
    assert looks
    for each in looks:
        assert all((heads.text > 0) is text for heads in each.heads)
        assert all(int(heads.seen.sum()) == 4 for heads in each.heads)
        assert all(heads.weights.sum() + heads.text == pytest.approx(1, abs=1e-4) for heads in each.heads)


def test_what_cannot_be_looked_at_is_said(pipe: Any, run: Any) -> None:
    with pytest.raises(ElfattError, match="no patch to look at"), watch(pipe):
        pass
    elfatt_sd.apply_patch(pipe, "tome")
    with pytest.raises(ElfattError, match="matches no patched layer; there are down_blocks"), watch(pipe, layer="x"):
        pass
    with pytest.raises(ElfattError, match="at="), watch(pipe, at=(0.5, 2.0)):
        pass
    with pytest.raises(ElfattError, match="no watched layer was approximated"), watch(pipe, step=99):
        run()
    assert "forward" not in vars(pipe.unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1)
