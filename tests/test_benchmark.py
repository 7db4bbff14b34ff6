"""The benchmarks measure what they say, on models small enough for a test; no time is asserted."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import Attention

from elfatt_sd import benchmark
from elfatt_sd.config import ElfattError, PatchConfig, Phase
from elfatt_sd.processor import ElfattProcessor

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "sample_size": 16,
    "block_out_channels": (16, 32),
    "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    "attention_head_dim": 2,
    "cross_attention_dim": 16,
    "norm_num_groups": 8,
    "layers_per_block": 1,
}
SMALL_XL: dict[str, Any] = {
    **SMALL,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 64,
}
SMALL_VAE: dict[str, Any] = {
    "block_out_channels": (8,) * 4,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "latent_channels": 4,
    "force_upcast": False,
}


@pytest.fixture(scope="module")
def model() -> benchmark.Model:
    return benchmark.Model(benchmark.random_unet(SMALL, CPU, torch.float32), 8)


@pytest.fixture
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "_SHAPES", {"sd15": SMALL, "sdxl": SMALL_XL})
    monkeypatch.setattr(benchmark, "_VAE", SMALL_VAE)


def methods() -> list[PatchConfig]:
    return [
        PatchConfig.preset("tome"),
        PatchConfig.preset("elfatt", block_size=32, agents=8),
        PatchConfig("fast", (Phase(0.2), Phase(1.0, "block", block_order="spread", block_size=32)), levels=2),
    ]


# Timing


def test_interleaved_calls_take_turns() -> None:
    """One warm-up round, then rounds that each start with another call."""
    seen: list[str] = []
    times = benchmark.interleave({name: lambda name=name: seen.append(name) for name in "abc"}, 3, CPU)
    assert {name: len(taken) for name, taken in times.items()} == {"a": 3, "b": 3, "c": 3}
    rounds = ["".join(seen[start : start + 3]) for start in range(0, 12, 3)]
    assert [sorted(each) for each in rounds] == [list("abc")] * 4
    assert len(set(rounds[1:])) == 3


def test_no_round_starts_late_but_one_is_run() -> None:
    seen: list[int] = []
    times = benchmark.interleave({"a": lambda: seen.append(0)}, 100, CPU, seconds=0)
    assert (len(seen), len(times["a"])) == (2, 1)


def test_a_call_is_timed() -> None:
    """Sleeping takes at least as long as asked for."""
    assert min(benchmark.interleave({"a": lambda: time.sleep(0.02)}, 2, CPU)["a"]) >= 0.02


def test_ratios_are_taken_within_rounds() -> None:
    assert benchmark.ratios([2.0, 4.0, 9.0], [1.0, 1.0, 3.0]) == {"median": 3.0, "min": 2.0, "max": 4.0}


@pytest.mark.parametrize("exponent", [1.0, 1.5, 2.0])
def test_exponent(exponent: float) -> None:
    tokens = [4096, 9216, 65536]
    fitted = benchmark.fit_exponent(tokens, [3e-9 * count**exponent for count in tokens])
    assert fitted == pytest.approx(exponent)
    assert benchmark.fit_exponent([4096], [1.0]) is None


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells what was resident")
def test_peak_memory_is_that_of_the_call() -> None:
    size = 400 * 2**20
    ones = functools.partial(torch.ones, size, dtype=torch.uint8)
    peak = benchmark._in_fresh_process(benchmark.peak_memory, ones, CPU)
    assert 0.9 * size < peak < 1.5 * size


def test_fresh_process() -> None:
    assert benchmark._in_fresh_process(os.getpid) != os.getpid()


# Methods and variants


@pytest.mark.parametrize(
    ("method", "counts"),
    [("sd", [50]), ("tome", [50]), ("agent", [20, 30]), ("elfatt", [10, 40])],
)
def test_phases_of_a_run(method: str, counts: list[int]) -> None:
    config = PatchConfig.preset(method)
    parts = benchmark.single_phases(config)
    assert [count for _, count in parts] == counts
    for part, _ in parts:
        assert all(phase.until == 1 for phase in part.phases)
    attentions = [part.phases[0].attention if part.phases else "softmax" for part, _ in parts]
    assert attentions == ([phase.attention for phase in config.phases] or ["softmax"])


def test_exact_phases_are_untouched() -> None:
    (exact, steps), _ = benchmark.single_phases(PatchConfig("x", (Phase(0.2), Phase(1.0, "block"))))
    assert (exact.phases, steps) == ((), 10)


def test_what_is_the_same_is_timed_once() -> None:
    variants, runs = benchmark._parts(methods())
    assert list(runs) == ["untouched", "tomesd", "tome", "floor", "elfatt", "fast", "floor of 2 levels"]
    assert runs["elfatt"] == [("elfatt/0", 10), ("tome/0", 40)]
    assert runs["fast"] == [("untouched", 10), ("fast/1", 40)]
    assert len(variants) == 7


def processors(unet: Any) -> dict[str, str]:
    return {
        name: type(module.processor).__name__
        for name, module in unet.named_modules()
        if isinstance(module, Attention) and name.endswith("attn1")
    }


def test_copies_share_weights_and_nothing_else(model: benchmark.Model) -> None:
    before = processors(model.unet)
    copy = benchmark.copy_structure(model.unet)
    for mine, theirs in zip(copy.parameters(), model.unet.parameters(), strict=True):
        assert mine is theirs
    benchmark.Variant("patch", PatchConfig.preset("tome")).install(copy)
    assert ElfattProcessor.__name__ in processors(copy).values()
    assert processors(model.unet) == before


@pytest.mark.parametrize(("levels", "layers"), [(1, 3), (2, 7)])
def test_floor_removes_the_layers_that_are_patched(model: benchmark.Model, levels: int, layers: int) -> None:
    config = PatchConfig("x", (Phase(1.0, "block"),), levels=levels)
    floor = benchmark.Variant("floor", config).install(benchmark.copy_structure(model.unet))
    patched = benchmark.Variant("patch", config).install(benchmark.copy_structure(model.unet))
    removed = {name for name, kind in processors(floor).items() if kind == "_NoAttention"}
    assert removed == {name for name, kind in processors(patched).items() if kind == "ElfattProcessor"}
    assert len(removed) == layers
    x = torch.randn(2, 64, 16)
    attention = floor.get_submodule(next(iter(removed)))
    assert torch.equal(attention(x), torch.zeros_like(x))


def test_tomesd_is_the_package(model: benchmark.Model) -> None:
    unet = benchmark.Variant("tomesd", PatchConfig.preset("tome", ratio=0.3)).install(
        benchmark.copy_structure(model.unet)
    )
    assert unet._tome_info["args"]["ratio"] == 0.3
    assert unet._tome_info["args"]["max_downsample"] == 1
    assert any(type(module).__name__ == "ToMeBlock" for module in unet.modules())


def test_weights_are_drawn_and_finite(model: benchmark.Model) -> None:
    inputs = model.inputs(128, 2)
    assert inputs["sample"].shape == (2, 4, 16, 16)
    out = benchmark._unet_call(model.unet, inputs)()
    assert out.isfinite().all()
    assert out.std() > 1e-3


# The benchmarks


def test_unet(model: benchmark.Model, tmp_path: Path) -> None:
    results = benchmark.unet(model, sizes=[64, 128], methods=methods(), repeats=2, device="cpu", memory=False)
    assert [(row["size"], row["method"]) for row in results["rows"][:3]] == [
        (64, "untouched"),
        (64, "tomesd"),
        (64, "tome"),
    ]
    assert len(results["rows"]) == 14
    for row in results["rows"]:
        assert row["gain"]["min"] <= row["gain"]["median"] <= row["gain"]["max"]
        assert sum(part["steps"] for part in row["parts"]) == 50
        assert set(row["over_floor"]) == {"floor", "floor of 2 levels"}
    elfatt = next(row for row in results["rows"] if row["method"] == "elfatt")
    assert len(elfatt["rounds"]) == 2
    assert results["settings"]["variants"]["elfatt/0"]["config"]["phases"][0]["attention"] == "elfatt"
    assert results["machine"]["cpu_cores"] == os.cpu_count()
    check_saved(results, tmp_path)


def test_rows_add_up_the_parts() -> None:
    runs = {"untouched": [("untouched", 50)], "x": [("untouched", 10), ("x/1", 40)], "floor": [("floor", 50)]}
    times = {"untouched": [5.0, 10.0], "x/1": [2.5, 5.0], "floor": [2.0, 4.0]}
    untouched, x, floor = benchmark._method_rows(runs, times, {"untouched": 7, "x/1": 9})
    assert x["rounds"] == [3.0, 6.0]
    assert x["gain"]["median"] == pytest.approx(5 / 3)
    assert x["over_floor"]["floor"]["median"] == pytest.approx(1.5)
    assert x["parts"][1]["gain"]["median"] == 2
    assert (untouched["peak_bytes"], x["peak_bytes"], floor["peak_bytes"]) == (7, 9, None)


def test_compiled_variants_are_all_compiled(model: benchmark.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda unet: compiled.append(unet) or unet)
    options: dict[str, Any] = {"repeats": 1, "device": "cpu", "memory": False, "compile": True}
    results = benchmark.unet(model, sizes=[64], methods=methods()[2:], **options)
    assert [row["method"] for row in results["rows"]] == ["untouched", "fast", "floor of 2 levels"]
    assert len({id(unet) for unet in compiled}) == 3


@pytest.mark.usefixtures("small_shapes")
@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_pipeline_with_random_weights(name: str, tmp_path: Path) -> None:
    results = benchmark.pipeline(name, sizes=[64], methods=methods(), repeats=1, steps=5, device="cpu")
    assert [row["method"] for row in results["rows"]] == ["untouched", "tomesd", "tome", "floor", "elfatt", "fast"]
    assert results["settings"]["steps"] == 5
    check_saved(results, tmp_path)


@pytest.mark.usefixtures("small_shapes")
def test_a_run_leaves_the_pipeline_as_it_was() -> None:
    pipe, inputs = benchmark._make_pipeline("sd15", CPU, torch.float32, 1)
    pipe.set_progress_bar_config(disable=True)
    unet, before = pipe.unet, processors(pipe.unet)
    for variant in (benchmark.Variant("patch", methods()[1]), benchmark.Variant("tomesd", methods()[0])):
        benchmark._run_pipeline(pipe, variant, inputs, 64, 5)
        assert pipe.unet is unet
        assert processors(unet) == before
        assert not any(type(module).__name__ == "ToMeBlock" for module in unet.modules())


def test_growth(tmp_path: Path) -> None:
    results = benchmark.growth(tokens=[256, 64], repeats=1, device="cpu", block_size=16)
    assert {row["part"] for row in results["rows"]} == {"attention", "layer"}
    assert [row["tokens"] for row in results["rows"]] == sorted(row["tokens"] for row in results["rows"])
    for fitted in results["exponents"].values():
        assert "softmax" in fitted
        assert all(value is not None and math.isfinite(value) for value in fitted.values())
    assert {f"block, {order}" for order in ("raster", "windows", "curve", "strided", "spread")} <= set(
        results["exponents"]["layer"]
    )
    check_saved(results, tmp_path)


def test_layers_that_would_take_too_long_are_left_out() -> None:
    results = benchmark.layer(tokens=[64, 256], repeats=1, device="cpu", block_size=16, max_seconds=1e-9)
    assert {row["tokens"] for row in results["rows"]} == {64}


def test_layer_needs_square_grids() -> None:
    with pytest.raises(ElfattError, match="tokens=1000"):
        benchmark.layer(tokens=[1000], repeats=1, device="cpu")


def test_cuda_graphs_need_cuda(model: benchmark.Model) -> None:
    with pytest.raises(ElfattError, match="graphs=True"):
        benchmark.unet(model, sizes=[64], device="cpu", graphs=True)


def test_merging(tmp_path: Path) -> None:
    results = benchmark.merging(tokens=[256], channels=32, repeats=2, device="cpu")
    assert [(row["dtype"], row["method"]) for row in results["rows"]] == [
        (dtype, name) for dtype in ("float32", "bfloat16") for name in ("tomesd", "ours", "ours, unordered")
    ]
    assert results["rows"][0]["gain"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    check_saved(results, tmp_path)


def test_unknown_method() -> None:
    with pytest.raises(ElfattError, match="'quick'"):
        benchmark.resolve_methods(["quick"])


def check_saved(results: benchmark.Results, folder: Path) -> None:
    """The files hold the results: JSON that reads back, a table row for each, a picture."""
    data, table, plot = benchmark.save(results, folder)
    assert json.loads(data.read_text()) == json.loads(json.dumps(results))
    lines = [line for line in table.read_text().splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    for row in results["rows"]:
        assert any(f"| {row['method']} | {row['seconds'] * 1e3:.4g} |" in line for line in lines)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_gpu_suite_writes_after_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that fails is written down; the others are there."""
    path = Path(__file__).parent.parent / "benchmarks" / "gpu_suite.py"
    spec = importlib.util.spec_from_file_location("gpu_suite", path)
    assert spec is not None and spec.loader is not None
    suite = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(suite)
    monkeypatch.setattr(suite, "TINY", SMALL)
    parts = "merging,sd15 512 batch 1,sd15 512 batch 8,sd15 512 batch 1 graph"
    monkeypatch.setattr(
        sys, "argv", ["gpu_suite.py", "--tiny", "--device", "cpu", "--out", str(tmp_path), "--only", parts]
    )
    written = []
    original = suite.Suite.write
    monkeypatch.setattr(suite.Suite, "write", lambda self: (original(self), written.append(read(tmp_path)))[0])
    suite.main()
    assert [len(results["parts"]) for results in written] == [1, 2, 3, 3, 3]
    assert "ElfattError" in written[-1]["errors"]["sd15 512 batch 1 graph"]
    assert {goal["method"] for goal in written[-1]["goals"]} == {"elfatt", "elfatt-fast"}


def read(folder: Path) -> Any:
    return json.loads((folder / "gpu_suite.json").read_text())
