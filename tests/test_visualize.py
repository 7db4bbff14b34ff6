"""Layers are watched in runs of UNets and of transformers, with any attention; figures say what they show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import tiny_pipelines as tiny
from support import tiny_transformers
from support.checks import runner
from torch import Tensor

import elfatt_sd
from elfatt_sd import errors as optional
from elfatt_sd import visualize
from elfatt_sd.attention.joint import Keys, exact_attention
from elfatt_sd.attention.ordering import Grid
from elfatt_sd.attention.softmax import block_attention, softmax_attention
from elfatt_sd.config import PatchConfig, Phase, known_method
from elfatt_sd.errors import ElfattError
from elfatt_sd.visualize import Grouping, Heads, Look, draw, watch


def watched(pipe: Any, method: Any, run: Any, **asked: Any) -> list[Look]:
    """Watch a run, and check that its image is that of the same run without being watched."""
    elfatt_sd.apply_patch(pipe, method)
    expected = run()
    with watch(pipe, **asked) as looks:
        seen = run()
    assert torch.equal(seen, expected)
    elfatt_sd.remove_patch(pipe)
    for each in looks:
        numbers = sorted(number for heads in each.heads for number in heads.numbers)
        assert numbers == list(range(len(numbers)))
        for heads in each.heads:
            assert heads.exact.sum() + heads.exact_text == pytest.approx(1, abs=1e-4)
    return looks


def phases(*given: Any, **settings: Any) -> PatchConfig:
    return PatchConfig("own", (Phase(*given, **settings),))


@pytest.fixture
def run(pipe: Any) -> Any:
    pipe.scheduler = tiny.ddim()
    return runner(pipe)


def test_elfatt_shows_merges_agents_blocks_and_the_error(pipe: Any, run: Any) -> None:
    [seen] = watched(pipe, phases(1.0, "elfatt", ratio=0.5, block_size=16, agents=8, block_order="windows"), run)
    assert (seen.step, seen.steps, seen.method) == (2, 4, "own") and "agents" in seen.what
    assert seen.merged is not None and seen.merged.count == seen.grid.tokens - seen.grid.tokens // 2
    assert [agents.count for agents in seen.agents] == [8]
    through_agents, inside = seen.heads
    assert through_agents.seen.all() and through_agents.same_keys is None
    assert inside.same_keys is not None and 1 < len(set(inside.same_keys)) < seen.grid.tokens
    same = inside.same_keys == inside.same_keys[seen.query]
    assert same[seen.query] and np.array_equal(inside.seen, same) and 0 < same.sum() < seen.grid.tokens
    assert [heads.weights.sum() for heads in seen.heads] == pytest.approx([1, 1], abs=1e-4)
    assert 0 < seen.relative_error < 2 and seen.error.shape == (seen.grid.tokens,)
    np.testing.assert_allclose(np.sqrt(np.mean(seen.error**2)), seen.relative_error, rtol=1e-6)


def test_phases_layers_steps_and_points(pipe: Any, run: Any) -> None:
    first, second = watched(pipe, "agent", run)
    assert first.step < second.step
    assert first.agents and first.agents[0].count < first.grid.tokens, "merged into agents"
    assert not second.agents and second.merged is not None
    [corrected] = watched(pipe, phases(1.0, "block", block_size=8, residual_steps=2), run)
    assert corrected.step % 2 == 1
    [reused] = watched(pipe, phases(1.0, "reuse", residual_steps=2), run, step=2)
    assert reused.heads == () and 0 < reused.relative_error < 2
    looks = watched(pipe, "tome", run, layer="up_blocks.*", step=3, at=(0.0, 1.0))
    assert len(looks) > 1 and {each.step for each in looks} == {2}
    assert len({each.layer for each in looks}) == len(looks) and all(each.layer.startswith("up") for each in looks)
    assert all(each.query == each.grid.tokens - each.grid.columns for each in looks)


def test_blocks_are_rectangles_and_an_attention_of_somebody_else_is_shown(pipe: Any, run: Any, module: str) -> None:
    [seen] = watched(pipe, phases(1.0, "block", block_size=16, block_order="windows"), run)
    labels = seen.heads[0].same_keys
    assert labels is not None
    for number in set(labels):
        rows, columns = np.nonzero(labels.reshape(seen.grid.rows, seen.grid.columns) == number)
        assert len(rows) == (np.ptp(rows) + 1) * (np.ptp(columns) + 1)
    [seen] = watched(pipe, known_method(module), run)
    assert [int(heads.seen.sum()) for heads in seen.heads] == [1] and seen.heads[0].seen[seen.query], "its own value"


@pytest.mark.parametrize("kind", ["sd3", "flux", "wan"])
def test_layers_that_join_text_are_shown(kind: str, folder: Path) -> None:
    if kind == "flux":
        pipe = tiny_transformers.flux(folder)
        run = runner(pipe, height=64, width=64)
    else:
        pipe, run = getattr(tiny_transformers, kind)()
    looks = watched(pipe, phases(1.0, "sampled", keys=4), run)
    assert looks
    for heads in (heads for each in looks for heads in each.heads):
        assert (heads.text > 0) is (kind != "wan") and int(heads.seen.sum()) == 4
        assert heads.weights.sum() + heads.text == pytest.approx(1, abs=1e-4)


def test_what_cannot_be_looked_at_is_said(pipe: Any, run: Any) -> None:
    with pytest.raises(ElfattError, match="no patch to look at"), watch(pipe):
        pass
    elfatt_sd.apply_patch(pipe, "tome")
    for asked, says in (
        ({"layer": "x"}, "matches no patched layer; there are down_blocks"),
        ({"at": (0.5, 2.0)}, "at="),
        ({"step": 99}, "no watched layer was approximated"),
    ):
        with pytest.raises(ElfattError, match=says), watch(pipe, **asked):
            run()
    assert "forward" not in vars(pipe.unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1)


# The pure part: weights, sets of keys, errors.


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 12, 2, 8, generator=generator) for _ in range(3)]


def exact(q: Tensor, k: Tensor, v: Tensor, context: Keys | None) -> Tensor:
    return exact_attention(q, [Keys(k, v), *([context] if context else [])])


def test_weights_are_those_of_softmax_also_beside_text_and_give_the_output_again() -> None:
    q, k, v = tensors()
    text = Keys(*(x[:, :5] for x in tensors()[1:]))
    for context in (None, text, text._replace(mask=torch.tensor([[True, True, False, True, False]]))):
        weights, beside = visualize.weights_of(exact, q, k, context, 3)
        keys = k[0] if context is None else torch.cat([k[0], context.k[0]])
        logits = torch.einsum("hd,nhd->hn", q[0, 3], keys) / 8**0.5
        if context is not None and context.mask is not None:
            logits[:, 12:] += context.mask.float().log()
        expected = logits.softmax(-1).numpy()
        np.testing.assert_allclose(weights, expected[:, :12], atol=1e-6)
        np.testing.assert_allclose(beside, expected[:, 12:].sum(-1), atol=1e-6)
    weights, _ = visualize.weights_of(lambda q, k, v, context: block_attention(q, k, v, 4), q, k, None, 5)
    mixed = torch.einsum("hn,nhd->hd", torch.from_numpy(weights).float(), v[0])
    torch.testing.assert_close(mixed, block_attention(q, k, v, 4)[0, 5])


def test_queries_that_see_the_same_keys_are_found_whatever_is_added_of_their_own_value(monkeypatch: Any) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, context: Keys | None) -> Tensor:
        first = block_attention(q[:, :, :1], k[:, :, :1], v[:, :, :1], 4) + 0.3 * v[:, :, :1]
        return torch.cat([first, softmax_attention(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:])], 2)

    for most, expected in ((512, [0] * 4 + [1] * 4 + [2] * 4), (2, None)):  # too many to be told apart
        monkeypatch.setattr(visualize, "MOST_SETS", most)
        blocks, everything = visualize.same_keys(attend, tensors()[0], None)
        assert (blocks if blocks is None else blocks.tolist()) == expected
        assert everything is not None and set(everything) == {0}


def test_errors_are_relative_to_the_exact_output() -> None:
    reference = torch.tensor([[3.0, 4.0], [0.0, 5.0]])
    error, relative = visualize.errors(reference + torch.tensor([[0.0, 5.0], [0.0, 0.0]]), reference)
    np.testing.assert_allclose(error, [1, 0])
    assert relative == pytest.approx(0.5**0.5)


# Figures.

EVEN = np.full(24, 1 / 24)
BLOCKS = np.arange(24) // 6
HEADS = (
    Heads((0,), None, EVEN, EVEN),
    Heads((1,), BLOCKS, np.where(BLOCKS == 1, 0.125, 0.0), EVEN, text=0.25, exact_text=0.4),
)
MERGED = Grouping("merge into one", np.arange(24) // 2)
AGENTS = Grouping("are averaged into one agent", np.arange(24) // 12)
PLACE = ("elfatt", "agents and blocks", "down_blocks.0.attn1", 2, 10)
LOOK = Look(*PLACE, Grid.image(4, 6), 8, HEADS, MERGED, (AGENTS,), np.linspace(0, 0.5, 24), 0.29)


def test_panels_show_what_is_there_in_colours_that_follow_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = draw(LOOK, Image.new("RGB", (48, 32), (200, 30, 30)))
    said = {axes.get_title(): " ".join(axes.get_xlabel().split()) for axes in figure.axes}
    named = ["image", "merged tokens", "agents", "shared keys, head 2", "exact attention", "the method, head 1"]
    assert [*said] == [*named, "the method, head 2", "error"]
    for name, part in {
        "merged tokens": "12 of 24 are left",
        "shared keys, head 2": "4 different sets",
        "exact attention": "darkest: 12.50% or more; 20% is from the text",
        "the method, head 2": "it sees 6 of 24 tokens; darkest: 37.50% or more; 25% is from the text",
        "error": "29.0% of its norm",
    }.items():
        assert part in said[name]
    assert "elfatt, timestep 3 of 10: agents and blocks\nlayer down_blocks.0.attn1, 4 x 6" in figure.get_suptitle()
    panels = {axes.get_title(): np.reshape(axes.images[-1].get_array(), (24, -1)) for axes in figure.axes[1:]}
    merged = panels["merged tokens"]
    assert len(np.unique(merged, axis=0)) == 12 and (merged[::2] == merged[1::2]).all()
    assert np.array_equal(panels["the method, head 2"][:, 3], HEADS[1].seen), "the rest is left free"
    assert (panels["error"][:, 3] == 1).all(), "the image below would change the scale"
    nothing = draw(replace(LOOK, heads=(), merged=None, agents=(), grid=Grid(2, 2, 6), query=3))
    assert [axes.get_title() for axes in nothing.axes] == ["error"] and "frame 1 of 2" in nothing.get_suptitle()
    names = [Heads(numbers, None, EVEN, EVEN).name for numbers in ((0,), (0, 1, 2), (0, 2))]
    assert names == ["head 1", "heads 1 to 3", "heads 1, 3"]
    monkeypatch.setitem(optional.PACKAGES, "matplotlib", optional.OptionalPackage("no_such", "plots", "eval"))
    with pytest.raises(ElfattError, match=r"pip install '\.\[eval\]'"):
        draw(LOOK)
