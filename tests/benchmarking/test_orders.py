"""Errors of block orders: every order and attention is compared, method by method."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_pipelines as tiny
from support import tiny_transformers

from benchmarks import orders as module
from benchmarks.orders import joint_configs, order_configs, orders
from elfatt_sd.attention.ordering import BLOCK_ORDERS
from elfatt_sd.benchmarking.plots import save
from elfatt_sd.benchmarking.record import Session
from elfatt_sd.config import PatchConfig, Phase
from elfatt_sd.errors import ElfattError
from elfatt_sd.methods import attentions
from elfatt_sd.runtime.exact_run import ExactRun
from elfatt_sd.toy import GUIDANCE, STEPS

RUN: dict[str, Any] = {"prompts": ["a"], "steps": 3, "device": "cpu", "draws": 2}
SOME: dict[str, Any] = {**RUN, "record_at": [0, 2]}


@pytest.fixture(autouse=True)
def pipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    pipe = tiny.sd15(folder, scheduler=tiny.ddim())
    monkeypatch.setattr(module, "load_pipeline", lambda model, **_: pipe)
    return pipe


@pytest.fixture
def flux(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    pipe = tiny_transformers.flux(folder)
    monkeypatch.setattr(module, "load_pipeline", lambda model, **_: pipe)
    return pipe


RASTER = PatchConfig("raster", (Phase(1.0, "block", block_size=16),))
SPREAD = PatchConfig("spread", (Phase(1.0, "block", block_size=16, block_order="spread"),))


def test_every_order_size_and_attention_is_compared() -> None:
    chosen = [(name, *config.phases) for name, config in order_configs().items()]
    blocks = {(phase.block_order, phase.block_size) for _, phase in chosen if phase.attention.name == "block"}
    assert blocks == {(order, size) for order in BLOCK_ORDERS if order != "sequence" for size in (32, 128, 512)}
    assert {phase.attention.name for _, phase in chosen} == {
        name for name, kind in attentions().items() if not kind.empty
    }
    assert len({phase for _, phase in chosen}) == len(chosen)


def test_orders(tmp_path: Path) -> None:
    results = orders("x", methods=[RASTER, SPREAD], **SOME)
    assert len(results["rows"]) == 2 * 2 * 3  # methods, steps, layers
    assert results["settings"]["guidance"] == 7.5
    _, table, plot = save(results, tmp_path / "orders.json")
    lines = table.read_text().splitlines()
    assert lines[0] == "| method | mean | step 0 | step 2 | layer 1 | layer 2 | layer 3 |"
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| raster", "| spread"]
    own = [row["error"] for row in results["rows"] if row["method"] == "raster"]
    assert lines[2].split(" | ")[1] == f"{sum(own) / len(own):.3f}"
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_stopped_run_has_the_steps_before(monkeypatch: pytest.MonkeyPatch) -> None:
    original, session = ExactRun.approximate, Session()

    def approximate(run: ExactRun, state: Any, again: Any, phase: Phase, step: int, config: PatchConfig) -> Any:
        if step == 2:
            raise KeyboardInterrupt
        return original(run, state, again, phase, step, config)

    monkeypatch.setattr(ExactRun, "approximate", approximate)
    with pytest.raises(KeyboardInterrupt):
        orders("x", methods=[RASTER, SPREAD], session=session, **SOME)
    assert session.results is not None
    assert {row["step"] for row in session.results["rows"]} == {0}


def test_the_toy_has_its_own_guidance_and_steps() -> None:
    settings = orders("toy", methods=[RASTER], record_at=[1], prompts=["a"], device="cpu", draws=1)["settings"]
    assert (settings["guidance"], settings["steps"]) == (GUIDANCE, STEPS)


def test_five_calls_are_compared_in_if_nobody_says_where() -> None:
    assert orders("x", methods=[RASTER], **{**RUN, "steps": 25})["settings"]["record_at"] == [2, 6, 12, 18, 23]
    assert {row["step"] for row in orders("x", methods=[RASTER], **{**RUN, "steps": 4})["rows"]} == {0, 1, 2, 3}


@pytest.mark.usefixtures("flux")
def test_every_step_of_a_transformer(tmp_path: Path) -> None:
    """Each approximation has a map; with many layers and steps, these are the lines of the tables."""
    results = orders("x", every_step=True, size=64, **{**RUN, "steps": 9})
    methods = dict.fromkeys(row["method"] for row in results["rows"])
    assert list(methods) == list(joint_configs())
    assert len(results["rows"]) == len(methods) * 9 * 2
    _, table, plot = save(results, tmp_path / "orders.json")
    by_layer, by_step = table.read_text().split("\n\n")
    assert [line.split(" | ")[0] for line in by_layer.splitlines()[2:]] == [
        "| 1: `transformer_blocks.0.attn`",
        "| 2: `single_transformer_blocks.0.attn`",
        "| mean",
    ]
    assert [line.split(" | ")[0] for line in by_step.splitlines()[2:]] == [
        *(f"| {step}" for step in range(9)),
        "| mean",
    ]
    for line, step in zip(by_step.splitlines()[2:-1], range(9), strict=True):
        for method, cell in zip(methods, line.strip("| ").split(" | ")[1:], strict=True):
            own = [row["error"] for row in results["rows"] if (row["method"], row["step"]) == (method, step)]
            assert len(own) == 2 and cell == f"{sum(own) / 2:.3f}"
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("flux")
def test_a_preset_is_what_it_is_on_the_family() -> None:
    """Exact in its first step, as elfatt-fast of transformers is."""
    rows = orders("x", methods=["elfatt-fast"], every_step=True, size=64, **{**RUN, "steps": 5})["rows"]
    assert [row["step"] for row in rows if row["error"] == 0] == [0, 0]
    assert len(rows) == 10


def test_a_video_model_has_frames(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wan 2.2: in each step, the layers of the transformer that it calls."""
    pipe = tiny_transformers.wan22(folder)
    monkeypatch.setattr(module, "load_pipeline", lambda model, **_: pipe)
    clip = {"every_step": True, "size": "64x96", "frames": 9}
    sampled = PatchConfig("few keys", (Phase(1.0, "sampled", block_size=16),))
    results = orders("x", methods=[sampled], **{**RUN, **clip})
    assert results["settings"]["frames"] == 9
    places = [(row["step"], row["layer"]) for row in results["rows"]]
    assert places == [(step, f"blocks.{block}.attn1") for step in range(3) for block in range(2)]
    assert all(row["error"] > 0 for row in results["rows"])
    _, table, plot = save(results, tmp_path / "orders.json")
    assert "layer 1 is `blocks.0.attn1`, layer 2 is `blocks.1.attn1`." in table.read_text()
    assert plot.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ElfattError, match="height=100"):
        orders("x", methods=[sampled], **{**RUN, **clip, "size": "64x100"})


@pytest.mark.usefixtures("flux")
def test_frames_of_a_model_that_makes_none_have_no_effect() -> None:
    with pytest.warns(UserWarning, match="frames=9 has no effect on a FluxPipeline"):
        orders("x", methods=[RASTER], size=64, frames=9, **SOME)


@pytest.mark.usefixtures("flux")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"methods": ["tome"]}, "method 'tome' merges tokens"),
        ({"methods": ["taylorseer"]}, "method='taylorseer' is not accepted here"),
        ({"methods": ["faster"]}, "method='faster'"),
        ({"record_at": [7]}, "record_at=7 is not accepted; the run has the denoiser's calls 0 to 2"),
        ({"steps": 5000}, "steps=5000"),
    ],
)
def test_what_is_not_accepted(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ElfattError, match=re.escape(says)):
        orders("x", size=64, **{**RUN, **options})


def test_a_model_of_no_known_family_is_refused(monkeypatch: pytest.MonkeyPatch, pipe: Any) -> None:
    monkeypatch.setattr(pipe, "unet", torch.nn.Linear(1, 1))
    with pytest.raises(ElfattError, match="Linear cannot be patched"):
        orders("x", **RUN)
