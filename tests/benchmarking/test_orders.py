"""Errors of block orders: every order and attention is compared, method by method, and a stopped run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_pipelines as tiny

from elfatt_sd.benchmarking import orders as module
from elfatt_sd.benchmarking.orders import orders
from elfatt_sd.benchmarking.plots import save
from elfatt_sd.benchmarking.presets import order_configs
from elfatt_sd.benchmarking.record import Session
from elfatt_sd.config import PatchConfig, Phase
from elfatt_sd.methods import attentions
from elfatt_sd.tiling import BLOCK_ORDERS

RUN: dict[str, Any] = {"prompts": ["a"], "steps": 3, "record_at": [0, 2], "device": "cpu", "draws": 2}


@pytest.fixture(autouse=True)
def small_pipeline(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tiny.sd15(folder, scheduler=tiny.ddim())
    monkeypatch.setattr(module, "load_pipeline", lambda model, **_: pipe)


def configs(*names: str) -> dict[str, PatchConfig]:
    known = {
        "raster": PatchConfig("raster", (Phase(1.0, "block", block_size=16),)),
        "spread": PatchConfig("spread", (Phase(1.0, "block", block_size=16, block_order="spread"),)),
    }
    return {name: known[name] for name in names}


def test_every_order_size_and_attention_is_compared() -> None:
    chosen = [(name, *config.phases) for name, config in order_configs().items()]
    blocks = {(phase.block_order, phase.block_size) for _, phase in chosen if phase.attention.name == "block"}
    assert blocks == {(order, size) for order in BLOCK_ORDERS if order != "sequence" for size in (32, 128, 512)}
    assert {phase.attention.name for _, phase in chosen} == {
        name for name, kind in attentions().items() if not kind.empty
    }
    assert len({phase for _, phase in chosen}) == len(chosen)


def test_orders(tmp_path: Path) -> None:
    results = orders("x", configs=configs("raster", "spread"), session=Session(tmp_path), **RUN)
    assert len(results["rows"]) == 2 * 2 * 3  # methods, steps, layers
    assert results["settings"]["guidance"] == 7.5
    _, table, plot = save(results, tmp_path / "orders.json")
    lines = table.read_text().splitlines()
    assert lines[0] == "| method | mean | step 0 | step 2 | layer 1 | layer 2 | layer 3 |"
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| raster", "| spread"]
    own = [row["error"] for row in results["rows"] if row["method"] == "raster"]
    assert lines[2].split(" | ")[1] == f"{sum(own) / len(own):.3f}"
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_stopped_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compared before Ctrl-C is not compared again."""
    compared: list[str] = []
    original = module.method_errors

    def compare(recording: Any, method: str, *rest: Any, **options: Any) -> Any:
        compared.append(method)
        if compared == ["raster", "spread"]:
            raise KeyboardInterrupt
        return original(recording, method, *rest, **options)

    monkeypatch.setattr(module, "method_errors", compare)
    both = configs("raster", "spread")
    with pytest.raises(KeyboardInterrupt):
        orders("x", configs=both, session=Session(tmp_path), **RUN)
    results = orders("x", configs=both, session=Session(tmp_path), **RUN)
    assert compared == ["raster", "spread", "spread"]
    assert {row["method"] for row in results["rows"]} == {"raster", "spread"}


def test_the_toy_has_its_own_guidance() -> None:
    from elfatt_sd.toy import GUIDANCE

    assert orders("toy", configs=configs("raster"), **RUN)["settings"]["guidance"] == GUIDANCE
