"""Benchmarks of a denoiser measure what they say, on models small enough for a test; no time is asserted."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.checks import QUICK, check_saved
from torch import Tensor

from elfatt_sd.benchmarking import record as timing
from elfatt_sd.benchmarking.models import Model, unet_call
from elfatt_sd.benchmarking.plots import plot
from elfatt_sd.benchmarking.record import make_rows
from elfatt_sd.benchmarking.tables import markdown
from elfatt_sd.benchmarking.unet import _graphed_call, _peak, unet
from elfatt_sd.benchmarking.variants import UNTOUCHED, Variant, patched_layers, varied
from elfatt_sd.config import PatchConfig, Phase
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import copy_structure
from elfatt_sd.measure import peak_memory
from elfatt_sd.methods import sampled
from elfatt_sd.runtime import call as state_module
from elfatt_sd.runtime.autotune import Tuner
from elfatt_sd.runtime.call import LayerCall


def test_unet(model: Model, methods: list[PatchConfig], tmp_path: Path) -> None:
    results = unet(model, sizes=[64, 128], methods=methods, repeats=2, device="cpu")
    names = ["untouched", "tomesd", "tome", "elfatt", "fast", "floor", "floor of 2 levels"]
    assert [(row["size"], row["method"]) for row in results["rows"]] == [
        (size, it) for size in (64, 128) for it in names
    ]
    for row in results["rows"]:
        assert set(row["speed"]) == {"untouched", "tomesd"}
        assert row["speed"]["untouched"]["min"] <= row["speed"]["untouched"]["max"]
        assert sum(part["steps"] for part in row.get("parts", [{"steps": 50}])) == 50
    elfatt, fast = results["rows"][3:5]
    assert (elfatt["floor"]["name"], fast["floor"]["name"]) == ("floor", "floor of 2 levels")
    assert elfatt["rounds"] == 2
    assert results["settings"]["variants"]["elfatt/0"]["config"]["phases"][0]["attention"] == "elfatt"
    assert results["machine"]["cpu_cores"] == os.cpu_count()
    check_saved(results, tmp_path)


def test_a_reused_matching_is_timed_beside_one_that_is_made(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every timed call of the first kind matches in each of three layers; of the second kind, none does."""
    from elfatt_sd.attention import merging

    monkeypatch.setattr(timing, "QUICK", 0.0)
    matched: list[int] = []
    original = merging.most_similar
    monkeypatch.setattr(
        merging, "most_similar", lambda metric, *rest: (matched.append(metric.shape[1]), original(metric, *rest))[1]
    )
    results = unet(model, sizes=[128], methods=[varied("tome", reuse_steps=2)], repeats=4, device="cpu", memory=[])
    small, warm_up = 3 * 2, 3  # a small call of both kinds, then the call whose matching is reused
    assert len(matched) == small + warm_up + 3 * 4
    assert matched.count(16 * 16) == warm_up + 3 * 4
    row = next(row for row in results["rows"] if row["method"].startswith("tome:"))
    assert [part["steps"] for part in row["parts"]] == [25, 25]


def test_a_difference_is_measured_in_the_calls_that_are_timed_for_it(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "QUICK", 0.0)
    measured: list[int] = []
    original = LayerCall.correct

    def correct(state: LayerCall, own: Any, exact: Any) -> Tensor:
        return original(state, own, lambda rows: (measured.append(math.prod(state.grid)), exact(rows))[1])

    monkeypatch.setattr(LayerCall, "correct", correct)
    config = PatchConfig("corrected", (Phase(1.0, "sampled", block_size=16, residual_steps=5),))
    results = unet(model, sizes=[128], methods=[config], repeats=4, device="cpu", memory=[])
    assert measured.count(16 * 16) == 3 + 3 * 4, "the warm-up of the calls that add it, and every call that measures it"
    row = next(row for row in results["rows"] if row["method"] == "corrected")
    assert [part["steps"] for part in row["parts"]] == [10, 40]


@pytest.mark.parametrize(("changes", "matchings"), [({"reuse_layers": True}, 1), ({"reuse_steps": 2}, 0)], ids=str)
def test_a_graph_holds_its_own_matching(
    model: Model, changes: dict[str, Any], matchings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is captured must match anew where a call does, and must not where steps share a matching."""
    made: list[int] = []
    find_candidates = state_module.find_candidates

    def counting(*args: Any) -> Any:
        made.append(1)
        return find_candidates(*args)

    @contextmanager
    def capturing(graph: Any) -> Iterator[None]:
        made.clear()
        yield
        captured.append(len(made))

    captured: list[int] = []
    monkeypatch.setattr(state_module, "find_candidates", counting)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=made.clear))
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    variant = Variant("patch", varied("tome", **changes))
    call = _graphed_call(variant.install(copy_structure(model.unet)), model.inputs(64, 2), variant)
    call()
    call()
    assert captured == [matchings]


def test_memory_that_runs_out_in_a_capture_is_told(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch ends the capture, which fails, too; the variant is to be left out, not the whole part."""

    @contextmanager
    def capturing(graph: Any) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    unit = copy_structure(model.unet)
    call = _graphed_call(unit, model.inputs(64, 2), UNTOUCHED)
    with pytest.raises(RuntimeError, match="previous error"):
        call()

    def run_out(**_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    calls = iter([unit.forward, unit.forward, run_out])
    monkeypatch.setattr(unit, "forward", lambda *args, **options: next(calls)(*args, **options))
    with pytest.raises(torch.OutOfMemoryError):
        _graphed_call(unit, model.inputs(64, 2), UNTOUCHED)()


@pytest.mark.parametrize("pays", [True, False])
def test_autotuned_variants_are_timed_beside_the_others(
    pays: bool, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are decided on at the size that is timed, also where others are warmed up small; patched where it pays."""
    decided: set[int] = set()
    calls = {"patched": 0}

    def decide(tuner: Tuner, state: LayerCall, phase: Phase, sample: torch.Tensor) -> bool:
        decided.add(sample.shape[-1])
        return pays

    def counting(*args: Any, **options: Any) -> torch.Tensor:
        calls["patched"] += 1
        return original(*args, **options)

    original = sampled.sampled_attention
    monkeypatch.setattr(sampled, "sampled_attention", counting)
    monkeypatch.setattr(Tuner, "pays", decide)
    monkeypatch.setattr(timing, "QUICK", 0.0)
    found = []
    for autotune in (False, True):
        calls["patched"] = 0
        config = varied("sampled", block_size=16)
        results = unet(model, sizes=[128], methods=[config], autotune=autotune, memory=[], **QUICK)
        found.append(([row["method"] for row in results["rows"]], calls["patched"]))
    (plain, before), (both, after) = found
    assert both == [*plain, f"{config.method}, autotuned"]
    assert decided == {model.inputs(128, 1)["sample"].shape[-1]}
    assert (after > before) == pays and (after == before) != pays


def test_autotune_and_compile_exclude_each_other(model: Model) -> None:
    with pytest.raises(ElfattError, match="autotune=True is not accepted with compile=True"):
        unet(model, sizes=[64], compile=True, autotune=True, **QUICK)


def test_compiled_variants_are_timed_beside_the_others(
    model: Model, methods: list[PatchConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Any] = []
    ran: set[int] = set()
    original = torch.compile

    def compile(unet: Any, dynamic: bool) -> Any:
        number = len(compiled)
        compiled.append(unet)
        made = original(unet, dynamic=dynamic, backend="eager")  # traces as the default does, needs no compiler
        made.register_forward_hook(lambda *_: ran.add(number))
        return made

    monkeypatch.setattr(torch, "compile", compile)
    results = unet(model, sizes=[64], methods=methods[2:], compile=True, **QUICK)
    plain = ["untouched", "fast", "floor of 2 levels"]
    assert [row["method"] for row in results["rows"]] == plain + [f"{name}, compiled" for name in plain]
    assert len({id(each) for each in compiled}) == len(ran) == 3
    last = results["rows"][-2]
    assert set(last["speed"]) == {"untouched", "untouched, compiled"}
    assert last["floor"]["name"] == "floor of 2 levels, compiled"


def test_a_plot_of_one_round_does_not_speak_of_medians(model: Model, methods: list[PatchConfig]) -> None:
    for repeats, said in ((1, "One round."), (2, "median over the rounds")):
        results = unet(model, sizes=[64], methods=methods[2:], repeats=repeats, device="cpu", memory=[])
        figure = plot(results)
        assert said in figure.get_supxlabel()
        assert results["machine"]["device"] in figure.get_suptitle()


def test_peaks_of_every_variant_but_the_floors(model: Model, methods: list[PatchConfig]) -> None:
    """Two batches give the growth for one more picture, which is two rows with guidance."""
    rows = unet(model, sizes=[64], methods=methods[2:], batch=2, **QUICK)["rows"]
    for row in rows[:2]:
        assert row["bytes_per_picture"] == pytest.approx(row["peak_bytes"], rel=0.1), row["method"]
    assert rows[2]["peak_bytes"] is rows[2]["bytes_per_picture"] is None
    rows = unet(model, sizes=[64], methods=methods[2:], memory=[2], **QUICK)["rows"]
    assert rows[0]["peak_bytes"] > 0
    assert rows[0]["bytes_per_picture"] is None
    rows = unet(model, sizes=[64], methods=methods[2:], memory=[], **QUICK)["rows"]
    assert {row["peak_bytes"] for row in rows} == {None}


def test_what_is_kept_for_later_steps_counts(model: Model, cpu: torch.device) -> None:
    """Also where the calls that were timed have kept it already, which a further call then only uses."""
    variant = Variant("patch", PatchConfig("kept", (Phase(1.0, "sampled", block_size=16, residual_steps=2),)))
    unit = variant.install(copy_structure(model.unet))
    call = unet_call(unit, model.inputs(256, 2))
    call()
    peak, used = _peak(unit, call, variant, cpu), peak_memory(call, cpu)
    states = patched_layers(unit)[0].patch.latest.states.values()
    kept = sum(kept.values.nbytes for state in states for kept in state.residuals.values())
    assert peak is not None and used is not None
    assert kept > 0
    assert peak - used > 0.8 * kept


def test_what_does_not_fit_costs_its_own_rows_only(
    model: Model, methods: list[PatchConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method with such a phase has no row; the table names it."""
    from elfatt_sd.benchmarking import unet as module

    tried: list[int] = []

    def make_call(unet: Any, inputs: Any) -> Any:
        call = unet_call(unet, inputs)
        states = [module.elfatt_state for module in unet.modules() if hasattr(module, "elfatt_state")]
        if not states or states[0].patch.config.phases[0].attention.name != "elfatt":
            return call

        def fail() -> None:
            tried.append(0)
            raise torch.OutOfMemoryError("out of memory")

        return fail

    monkeypatch.setattr(module, "unet_call", make_call)
    monkeypatch.setattr(module, "_warm_up", lambda units, variants, calls, small: calls)
    results = unet(model, sizes=[64], methods=methods, repeats=3, device="cpu")
    assert len(tried) == 1
    rows = {row["method"]: row["rounds"] for row in results["rows"]}
    assert rows == dict.fromkeys(["untouched", "tomesd", "tome", "fast", "floor", "floor of 2 levels"], 3)
    assert "Did not fit into memory (64 pixels, batch 2): elfatt/0." in markdown(results)


def test_without_the_untouched_call_the_others_are_shown(model: Model, tmp_path: Path) -> None:
    """At the greatest size it is the first that does not fit; the page with all results is drawn all the same."""
    results = unet(model, sizes=[64, 128], methods=["tome"], memory=[], **QUICK)
    group = results["groups"][1]
    group["lost"].append("untouched")
    group["times"]["untouched"].clear()
    results["rows"] = make_rows(results)
    check_saved(results, tmp_path)
    assert [row["size"] for row in results["rows"] if row["method"] == "untouched"] == [64]


def test_cuda_graphs_need_cuda(model: Model) -> None:
    with pytest.raises(ElfattError, match="graphs=True"):
        unet(model, sizes=[64], device="cpu", graphs=True)
