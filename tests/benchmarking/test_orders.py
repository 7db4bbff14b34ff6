"""Errors of attentions and block orders: inputs are the pipeline's own, figures those of a dense formula."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from support import tiny_pipelines as tiny
from support import tiny_transformers
from support.checks import runner, stopped_at
from torch import Tensor

import elfatt_sd
from benchmarks import orders as module
from benchmarks.errors import measure_errors
from benchmarks.orders import joint_configs, orders
from elfatt_sd.benchmarking.report import Session, markdown, save
from elfatt_sd.config import LayerPhases, PatchConfig, Phase
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import find_layers, main_denoiser
from elfatt_sd.tuning.probe import ExactRun

BLOCKS = PatchConfig("blocks", (Phase(1.0, "block", block_size=16),))
SPREAD = PatchConfig("spread", (Phase(1.0, "block", block_size=16, block_order="spread"),))
RUN: dict[str, Any] = {"prompts": ["a"], "steps": 3, "device": "cpu", "draws": 2}
SOME: dict[str, Any] = {**RUN, "record_at": [0, 2]}
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def pipe(folder: Path) -> Any:
    return tiny.sd15(folder, scheduler=tiny.ddim())


@pytest.fixture
def loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The pipeline that `orders` loads: a Flux unless another one is put there."""
    own = {"pipe": tiny_transformers.flux(folder)}
    monkeypatch.setattr(module, "load_pipeline", lambda model, **_: own["pipe"])
    return own


def draw(pipe: Any) -> Tensor:
    generators = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    options: dict[str, Any] = {"height": 32, "width": 32, "guidance_scale": 3.0, "num_inference_steps": 4}
    made: Tensor = pipe(["a cat", "a dog"], generator=generators, output_type="latent", **options).images
    return made


def errors(
    pipe: Any, *configs: PatchConfig, at: tuple[int, ...] = (1, 3), run: Callable[[], Any] | None = None, draws: int = 4
) -> Rows:
    """The rows of all methods, whose steps are told in their order."""
    found: dict[int, Rows] = {}
    wanted = lambda method, step: step in at  # noqa: E731
    named = {config.method: config for config in configs}
    measure_errors(pipe, named, run or (lambda: draw(pipe)), found.__setitem__, wanted=wanted, draws=draws)
    assert [*found] == sorted(found) and all(row["step"] == step for step, rows in found.items() for row in rows)
    return [row for rows in found.values() for row in rows]


@pytest.mark.parametrize(("text", "phase"), [(0, BLOCKS.phases[0]), (16, Phase(1.0, "sampled", keys=16))])
def test_errors_are_those_of_a_patched_layer(pipe: Any, folder: Path, text: int, phase: Phase) -> None:
    """Measured in an exact run, it is what a patch of one layer gives: of four images, and of one with its text."""
    run, seen, measured = lambda: draw(pipe), list[Tensor](), list[Tensor]()
    if text:
        pipe = tiny_transformers.flux(folder)
        run = runner(pipe, output_type="latent", max_sequence_length=text, height=64, width=64)
    layer = find_layers(main_denoiser(pipe))[-1 if text else 0]
    method = PatchConfig("one", per_layer=(LayerPhases(layer.name, (Phase(0.25), phase)),))
    with layer.attention.register_forward_hook(lambda *args: seen.append(args[2])):
        before = run()
        with elfatt_sd.patched(pipe, method):
            run()
    [row] = errors(pipe, method, at=(1,), run=lambda: measured.append(run()), draws=1)
    assert torch.equal(measured[0], before) and torch.equal(run(), before)
    exact, approximated = (calls[1][:, text:].flatten(1) for calls in (seen[: len(seen) // 2], seen[len(seen) // 2 :]))
    each = (approximated - exact).norm(dim=1) / exact.norm(dim=1)
    assert (row["layer"], len(each)) == (layer.name, 1 if text else 4)
    found = [row["error"], row["least"], row["greatest"]]
    assert found == pytest.approx([float(each.mean()), float(each.min()), float(each.max())], rel=1e-3)
    assert row["least"] > 1e-3


def test_each_method_is_compared_where_it_approximates(pipe: Any) -> None:
    """In its own layers; where its attention is exact, there is no error."""
    late = PatchConfig("late", (Phase(0.5), Phase(1.0, "block", block_size=16)))
    whole = PatchConfig("whole", (Phase(1.0, "block", block_size=256, block_order="spread"),))
    rows = errors(pipe, late, whole, PatchConfig("deeper", BLOCKS.phases, levels=2))
    own = [row for row in rows if row["method"] == "late"]
    assert all((row["error"] == 0.0) is (row["step"] == 1) for row in own) and len(own) == 2 * 3
    assert all(row["error"] < 1e-5 for row in rows if row["method"] == "whole"), "one block, in any order"
    one, two = ({row["layer"] for row in rows if row["method"] == name} for name in ("late", "deeper"))
    assert len(one) == 3 and one < two
    config = PatchConfig("corrected", (Phase(1.0, "sampled", block_size=16, residual_steps=4),))
    with pytest.raises(ElfattError, match=r"residual_steps=4 is not accepted here; errors are those of single steps\."):
        errors(pipe, config)


def test_orders(pipe: Any, loaded: dict[str, Any], tmp_path: Path) -> None:
    """How tables look is tried with those that are published; a run that is stopped has the steps before."""
    loaded["pipe"] = pipe
    results = orders("x", methods=[BLOCKS, SPREAD], **SOME)
    assert len(results["rows"]) == 2 * 2 * 3  # methods, steps, layers
    assert results["settings"]["guidance"] == 7.5
    table, plot = save(results, tmp_path / "orders.json")
    own = [row["error"] for row in results["rows"] if row["method"] == "blocks"]
    assert table.read_text().splitlines()[2].startswith(f"| blocks | {sum(own) / len(own):.3f} |")
    assert plot.read_bytes().startswith(b"\x89PNG")
    session, before = Session(), draw(pipe)
    hooks = sum(len(module._forward_pre_hooks) for module in pipe.unet.modules())
    with stopped_at(ExactRun, "approximate", lambda run, state, again, phase, step, config: step == 2):
        orders("x", methods=[BLOCKS, SPREAD], session=session, **SOME)
    assert {row["step"] for row in session.results["rows"]} == {0}
    assert torch.equal(draw(pipe), before) and not elfatt_sd.is_patched(pipe)
    assert sum(len(module._forward_pre_hooks) for module in pipe.unet.modules()) == hooks


@pytest.mark.usefixtures("loaded")
def test_every_step_of_a_transformer(tmp_path: Path) -> None:
    """Each approximation has a map; with many layers and steps, these are the lines of the tables."""
    results = orders("x", every_step=True, size=64, **{**RUN, "steps": 9})
    methods = list(dict.fromkeys(row["method"] for row in results["rows"]))
    assert methods == list(joint_configs()) and len(results["rows"]) == len(methods) * 9 * 2
    table, plot = save(results, tmp_path / "orders.json")
    by_step = [line.split(" | ") for line in table.read_text().split("\n\n")[1].splitlines()]
    own = [row["error"] for row in results["rows"] if (row["method"], row["step"]) == (methods[0], 4)]
    assert by_step[2 + 4][:2] == ["| 4", f"{sum(own) / 2:.3f}"] and plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(not hasattr(diffusers, "AutoencoderKLWan"), reason="this version of diffusers has no Wan 2.2")
def test_a_video_model_has_frames(folder: Path, loaded: dict[str, Any]) -> None:
    """Wan 2.2: in each step, the layers of the transformer that it calls."""
    loaded["pipe"] = tiny_transformers.wan22(folder)
    clip = {"every_step": True, "size": "64x96", "frames": 9}
    sampled = PatchConfig("few keys", (Phase(1.0, "sampled", block_size=16),))
    results = orders("x", methods=[sampled], **{**RUN, **clip})
    assert results["settings"]["frames"] == 9
    places = [(row["step"], row["layer"]) for row in results["rows"]]
    assert places == [(step, f"blocks.{block}.attn1") for step in range(3) for block in range(2)]
    assert all(row["error"] > 0 for row in results["rows"])
    assert "layer 1 is `blocks.0.attn1`, layer 2 is `blocks.1.attn1`." in markdown(results)
    with pytest.raises(ElfattError, match="height=100"):
        orders("x", methods=[sampled], **{**RUN, **clip, "size": "64x100"})
