"""What is timed is what it is called; rows, tables and conclusions follow from rounds. No time is asserted."""

from __future__ import annotations

import functools
import inspect
import io
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from support import checks, tiny_transformers
from support.checks import Work, counting, elfatt_processors
from syrupy.assertion import SnapshotAssertion
from torch import Tensor

import benchmarks.shown  # noqa: F401  (how results of scripts look)
from benchmarks.goals import all_goals, memory_slopes
from elfatt_sd import benchmarking
from elfatt_sd.attention import merging
from elfatt_sd.attention.ordering import BLOCK_ORDERS
from elfatt_sd.benchmarking import Model, layer, layer_calls, layer_phases, pipeline, unet, unet_call, variants
from elfatt_sd.benchmarking.report import Results, Session, clock, make_rows, markdown, own_part, save, show
from elfatt_sd.benchmarking.variants import Variant, is_reference, line_up, patched_layers, resolve_methods, varied
from elfatt_sd.cli.bench import read_method
from elfatt_sd.config import PatchConfig, Phase, known_method
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import copy_structure
from elfatt_sd.measure import peak_memory
from elfatt_sd.methods import attentions, sampled
from elfatt_sd.runtime.autotune import Tuner
from elfatt_sd.runtime.call import LayerCall
from elfatt_sd.runtime.joint_processor import JointProcessor
from elfatt_sd.runtime.processor import ElfattProcessor

CPU = torch.device("cpu")
QUICK: dict[str, Any] = {"repeats": 1, "device": "cpu"}
PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "results"
COMPUTING = {name for name, kind in attentions().items() if not kind.empty}
NAMES = ["untouched", "tomesd", "tome", "elfatt", "fast", "floor", "floor of 2 levels"]


def check_saved(results: Results, folder: Path) -> None:
    """JSON that reads back, a table row for each, a picture."""
    path = folder / "x.json"
    path.write_text(json.dumps(results))
    table, plot = save(results, path)
    lines = [line for line in table.read_text().splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    for row in results["rows"]:
        assert any(f"| {row['method']} | {clock(row['seconds'])} |" in line for line in lines)
    assert plot.read_bytes().startswith(b"\x89PNG")


# Layers.


@pytest.mark.usefixtures("narrow")
def test_layers(tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention is timed under its name, an order with what it draws; what takes too long is left out."""
    called = counting(monkeypatch, benchmarking, "attend", lambda attention, *_: attention.name)
    calls = layer_calls(16, 2, 32, CPU, torch.float32)["attention"]
    assert {name.removesuffix("s") for name in calls} == COMPUTING
    for name, call in calls.items():
        called.clear()
        assert call().shape == (2, 256, 4, 8) and called == [name.removesuffix("s")]
    phases = layer_phases(128).values()
    assert {phase.attention.name for phase in phases} == COMPUTING
    assert {phase.block_order for phase in phases if phase.attention.name == "block"} == {*BLOCK_ORDERS} - {"sequence"}
    drawn = counting(monkeypatch, LayerCall, "begin")
    with pytest.warns(UserWarning) as told:
        results = layer(tokens=[64, 256], block_size=16, repeats=2, max_seconds=1e-9, device="cpu")
    assert len(drawn) >= 3 * len(layer_phases(16)), "in the warm-up and two rounds"
    assert all("256 tokens" in str(each.message) and "left out, as" in str(each.message) for each in told)
    assert len(told) == 2
    assert all(row["peak_bytes"] >= 2 * 64 * 32 * 4 for row in results["rows"]), "the result at least"
    assert {row["tokens"] for row in results["rows"]} == {64}
    check_saved(results, tmp_path)
    known_method(module)  # of somebody else, which this registers
    assert layer_calls(16, 2, 32, CPU, torch.float32)["attention"]["values"]().shape == (2, 256, 4, 8)


# Calls of a denoiser.


def test_unet(model: Model, methods: list[PatchConfig], tmp_path: Path) -> None:
    """Two batches give the growth of the memory for one more image, which is two rows with guidance."""
    results = unet(model, sizes=[64, 128], methods=methods, repeats=2, device="cpu")
    rows = results["rows"]
    assert [(row["size"], row["method"]) for row in rows] == [(size, it) for size in (64, 128) for it in NAMES]
    for row in rows:
        assert set(row["speed"]) == {"untouched", "tomesd"}
        assert row["speed"]["untouched"]["min"] <= row["speed"]["untouched"]["max"]
        assert sum(part["steps"] for part in row.get("parts", [{"steps": 50}])) == 50
        floor = row["method"].startswith("floor")
        assert (row["peak_bytes"] is row["bytes_per_picture"] is None) == floor
        assert floor or row["bytes_per_picture"] == pytest.approx(row["peak_bytes"], rel=0.1)
    elfatt, fast = rows[3:5]
    assert (elfatt["floor"]["name"], fast["floor"]["name"]) == ("floor", "floor of 2 levels")
    assert elfatt["rounds"] == 2
    assert results["settings"]["variants"]["elfatt/0"]["config"]["phases"][0]["attention"] == "elfatt"
    assert results["machine"]["cpu_cores"] == os.cpu_count()
    check_saved(results, tmp_path)
    # At the greatest size the untouched call is the first that does not fit: the others are shown all the same.
    group = results["groups"][1]
    group["lost"].append("untouched")
    group["times"]["untouched"].clear()
    results["rows"] = make_rows(results)
    check_saved(results, tmp_path)
    assert [row["size"] for row in results["rows"] if row["method"] == "untouched"] == [64]


@pytest.mark.parametrize("kept", ["matching", "difference"])
def test_what_calls_keep_is_timed_and_what_makes_it(kept: str, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every timed call of the first kind matches, or measures, in each of three layers; of the second kind, none."""
    made = counting(monkeypatch, merging, "most_similar", lambda metric, *_: metric.shape[1])
    correct = LayerCall.correct

    def corrected(state: LayerCall, own: Any, exact: Any) -> Tensor:
        return correct(state, own, lambda rows: (made.append(math.prod(state.grid)), exact(rows))[1])

    monkeypatch.setattr(LayerCall, "correct", corrected)
    config, steps = varied("tome", reuse_steps=2), [25, 25]
    if kept == "difference":
        config = PatchConfig("corrected", (Phase(1.0, "sampled", block_size=16, residual_steps=5),))
        steps = [10, 40]
    results = unet(model, sizes=[128], methods=[config], repeats=4, device="cpu", memory=[])
    assert made.count(16 * 16) == 3 * 2 + 3 * 4, "the warm-up of both kinds, and every call that makes it"
    row = next(row for row in results["rows"] if row["method"] == config.method)
    assert [part["steps"] for part in row["parts"]] == steps
    assert row["peak_bytes"] is None


def test_autotuned_variants_are_patched_where_it_pays(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are decided on at the size that is timed."""
    decided: set[int] = set()
    calls, counts = counting(monkeypatch, sampled, "sampled_attention"), []
    for pays in (True, False):
        decide = lambda _, state, phase, sample, pays=pays: decided.add(sample.shape[-1]) or pays  # noqa: E731
        monkeypatch.setattr(Tuner, "pays", decide)
        calls.clear()
        config = varied("sampled", block_size=16)
        results = unet(model, sizes=[128], methods=[config], autotune=True, memory=[], **QUICK)
        counts.append(len(calls))
    names = [row["method"] for row in results["rows"]]
    assert names == ["untouched", config.method, "floor", f"{config.method}, autotuned"]
    assert decided == {model.inputs(128, 1)["sample"].shape[-1]} and counts[0] == 2 * counts[1] > 0


def test_compiled_ones_are_own_copies(
    model: Model, methods: list[PatchConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda unet, dynamic: compiled.append(unet) or unet)
    results = unet(model, sizes=[64], methods=methods[2:], compile=True, memory=[], **QUICK)
    plain = ["untouched", "fast", "floor of 2 levels"]
    assert [row["method"] for row in results["rows"]] == plain + [f"{name}, compiled" for name in plain]
    assert len(compiled) == len({*map(id, compiled)}) == 3
    last = results["rows"][-2]
    assert set(last["speed"]) == {"untouched", "untouched, compiled"}
    assert last["floor"]["name"] == "floor of 2 levels, compiled"


def test_what_is_kept_for_later_steps_counts(model: Model) -> None:
    """Also where the calls that were timed have kept it already, which a further call then only uses."""
    variant = Variant("patch", PatchConfig("kept", (Phase(1.0, "sampled", block_size=16, residual_steps=2),)))
    unit = variant.install(copy_structure(model.unet))
    call = unet_call(unit, model.inputs(256, 2))
    call()
    peak, used = benchmarking._peak(unit, call, variant, CPU), peak_memory(call, CPU)
    states = patched_layers(unit)[0].patch.latest.states.values()
    kept = sum(kept.values.nbytes for state in states for kept in state.residuals.values())
    assert kept > 0
    assert peak - used > 0.8 * kept


def test_what_does_not_fit_has_no_rows(
    model: Model, methods: list[PatchConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method with such a phase has no row, and is not tried again; the table names it. Other errors go on."""
    tried: list[int] = []
    errors: list[Exception] = [torch.OutOfMemoryError("out of memory"), RuntimeError("other")]

    def make_call(unet: Any, inputs: Any) -> Any:
        def fail() -> None:
            tried.append(0)
            raise errors[0]

        layers = patched_layers(unet)
        fails = layers and layers[0].patch.config.phases[0].attention.name == "elfatt"
        return fail if fails else unet_call(unet, inputs)

    monkeypatch.setattr(benchmarking, "unet_call", make_call)
    results = unet(model, sizes=[64], methods=methods, repeats=3, device="cpu")
    assert len(tried) == 1
    assert {row["method"]: row["rounds"] for row in results["rows"]} == dict.fromkeys({*NAMES} - {"elfatt"}, 3)
    assert "Did not fit into memory (64 pixels, batch 2): elfatt/0." in markdown(results)
    del errors[0]
    with pytest.raises(RuntimeError, match="other"):
        unet(model, sizes=[64], methods=methods, **QUICK)


def test_a_transformer_is_timed_like_a_unet() -> None:
    flux = Model(tiny_transformers.flux_transformer(), 8)
    found: Any = unet(flux, sizes=("96x64",), repeats=1, memory=(1,), batch=1, device="cpu")
    rows = {row["method"]: row for row in found["rows"]}
    assert {"untouched", "agent", "elfatt", "elfatt-fast", "elfatt-quality"} <= set(rows)
    assert not {"tome", "tomesd"} & set(rows), "nothing is merged where positions are rotary"
    assert {row["size"] for row in rows.values()} == {"96x64"}
    ids = flux.inputs("96x64", 1)["img_ids"]
    assert [int(ids[:, axis].max()) + 1 for axis in (1, 2)] == [4, 6], "rows, columns: the width is said first"
    for kind, calls in (("untouched", 2), (variants.FLOOR, 0)):
        call = unet_call(Variant(kind, PatchConfig("all")).install(copy_structure(flux.unet)), flux.inputs(64, 1))
        with Work() as work:
            call()
        assert work.calls == calls, "the floor attends to nothing"
    with pytest.raises(ElfattError, match=r"model='flux' has no pipeline here"):
        benchmarking.make_pipeline("flux", CPU, torch.float32, 1)


# Pipelines.


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_pipeline_with_random_weights(
    name: str, small_shapes: None, methods: list[PatchConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: dict[int, set[str]] = {}
    weights: set[int] = set()

    def look(pipe: Any, *_: Any) -> None:
        kinds = {type(module).__name__ for module in pipe.unet.modules()} & {"ToMeBlock"}
        ran[id(pipe.unet)] = kinds | ({ElfattProcessor.__name__} if elfatt_processors(pipe.unet) else set())
        weights.add(id(pipe.unet.conv_in.weight))  # which all copies share

    counting(monkeypatch, benchmarking, "_run", look)
    results = pipeline(name, sizes=[64], methods=methods, steps=5, **QUICK)
    assert sorted(map(sorted, ran.values())) == [[], [], [], *[[ElfattProcessor.__name__]] * 3, ["ToMeBlock"]]
    assert len(weights) == 1
    assert [row["method"] for row in results["rows"]] == NAMES
    peaks = {row["method"]: row["peak_bytes"] for row in results["rows"]}
    assert peaks.pop("floor") is peaks.pop("floor of 2 levels") is None
    assert all(peak > 64 * 64 * 3 * 4 for peak in peaks.values()), "the image at least"
    check_saved(results, tmp_path)


def test_a_transformer_is_timed_at_its_own_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its configuration does not name one; the pipeline does."""
    pipe = tiny_transformers.flux(folder)
    pipe.default_sample_size = 8
    pipe.vae.register_to_config(shift_factor=0.0)
    monkeypatch.setattr(benchmarking, "make_pipeline", lambda *_: (pipe, {"prompt": ["a red circle"]}))
    results = pipeline("x", steps=5, **QUICK)
    sizes = {row["method"]: row["size"] for row in results["rows"]}
    assert {"untouched", "elfatt-fast", "floor"} <= set(sizes), "as they are on transformers, where one level is all"
    assert not {"tome", "tomesd", "floor of 2 levels"} & set(sizes)
    assert set(sizes.values()) == {8 * pipe.vae_scale_factor}


def test_copies_have_their_own_second_transformer() -> None:
    """Wan 2.2 has two, which take turns: both are patched or left out, and those of the pipeline are as before."""
    pipe, _ = tiny_transformers.wan(second=True)
    config = PatchConfig("spread", (Phase(1.0, "cell_spread", block_size=8),))
    for variant in (Variant("patch", config), Variant(variants.FLOOR, config)):
        other = benchmarking.twin(pipe, variant)
        for part in ("transformer", "transformer_2"):
            own, original = ([block.attn1.processor for block in getattr(each, part).blocks] for each in (other, pipe))
            assert all(isinstance(processor, JointProcessor) for processor in own), variant.kind
            assert not any(isinstance(processor, JointProcessor) for processor in original)


# Variants.

LATE = PatchConfig("late", (Phase(0.1), Phase(1.0, ratio=0.5)), reuse_steps=4)
CUT = [
    varied("elfatt-fast", attention_backend="flash"),
    varied("tome", reuse_steps=3),  # each n steps of a phase have one matching, made in the first of them
    varied("elfatt", reuse_steps=4),  # steps 8 and 9 merge as ELFATT
    LATE,
    varied("elfatt-fast", residual_steps=4),  # steps 10 and 11 are the rest of a group, which has to begin anew
    varied("elfatt-fast", reuse_steps=2),  # nothing is merged
]
PEERS = [varied("deepcache", cache_interval=2), "deepcache", "tgate", "elfatt-fast", varied("tomesd", ratio=0.7)]


@pytest.mark.parametrize(
    ("methods", "options"),
    [
        (None, {}),
        (["sd", "agent", *CUT], {}),
        (["tomesd", "elfatt-fast"], {}),
        (["tomesd", "tome", "sampled"], {"ending": variants.AUTOTUNED}),
        (["tome", "elfatt", "spread"], {"ending": variants.COMPILED}),
        ([PatchConfig.preset("tome", ratio=0.3, max_downsample=2)], {}),
        (PEERS, {"by_phase": False}),
    ],
    ids=["default", "cut", "tomesd", "autotuned", "compiled", "downsampled", "peers"],
)
def test_lineups(methods: Any, options: dict[str, Any], snapshot: SnapshotAssertion) -> None:
    """Of which calls a method's run is made: of a phase, that match or use a matching again, each kind of work once."""
    lineup = line_up(resolve_methods(methods), **{"by_phase": True, **options})
    runs = [
        f"{row}: {', '.join(f'{steps} {name}' for name, steps in run.parts)}; {run.floor}"
        for row, run in lineup.runs.items()
    ]
    assert [*runs, "", *(f"{name} = {each.to_dict()['what']}" for name, each in lineup.variants.items())] == snapshot


def test_methods_by_default_and_by_name(model: Model, tmp_path: Path) -> None:
    """Settings change those of all presets and variations that have them."""
    everything = {config.method: config for config in resolve_methods(None, ratio=0.25, seed=3)}
    assert {config.seed for config in everything.values()} == {3}
    ratios = {name: phase.ratio for name, config in everything.items() for phase in config.phases if phase.ratio}
    assert {"tome", "tome:reuse_steps=2"} <= ratios.keys() and {*ratios.values()} == {0.25}
    assert "elfatt:ratio=0" not in ratios
    assert everything["elfatt-fast"].with_settings(seed=0) == PatchConfig.preset("elfatt-fast")
    saved = [str(tmp_path / name) for name in ("tomesd.json", "elfatt-fast.json", "ratio=0.5.json")]
    for ratio, path in zip((0.1, 0.2, 0.3), saved, strict=True):
        PatchConfig.preset("tome", ratio=ratio).save(path)
    assert {config.method for config in resolve_methods([*map(read_method, saved), "elfatt-fast"])} > {*saved}
    with pytest.warns(UserWarning, match="method 'elfatt-fast:stride=3' has no setting stride"):
        line_up([varied("elfatt-fast", stride=3)], model.unet, by_phase=True)
    with pytest.raises(ElfattError, match="deepcache:cache_interval=2 is timed over a whole"):
        line_up(resolve_methods(PEERS), by_phase=True)


@pytest.mark.parametrize(("levels", "layers"), [(1, 3), (2, 6)])
def test_floor_removes_the_layers_that_are_patched(model: Model, levels: int, layers: int) -> None:
    before, weights = dict(model.unet.attn_processors), [*model.unet.parameters()]
    lineup = line_up([PatchConfig("x", (Phase(1.0, "block"),), levels=levels)], by_phase=True)
    floor, patched = (
        lineup.variants[name].install(copy_structure(model.unet)) for name in (lineup.runs["x"].floor, "x/0")
    )
    removed = [name for name, part in floor.named_modules() if inspect.isfunction(getattr(part, "processor", None))]
    assert removed == elfatt_processors(patched)
    assert len(removed) == layers
    x = torch.randn(2, 64, 16)
    assert torch.equal(floor.get_submodule(removed[0])(x), torch.zeros_like(x))
    assert model.unet.attn_processors == before, "copies share weights and nothing else"
    assert all(mine is theirs for mine, theirs in zip(patched.parameters(), weights, strict=True))


def test_tomesd_has_the_settings_of_the_method(model: Model) -> None:
    for config, expected in (
        (varied("tomesd", ratio=0.7, stride=4, use_rand=False), {"ratio": 0.7, "sx": 4, "sy": 4, "use_rand": False}),
        (PatchConfig.preset("tome", ratio=0.3, max_downsample=2), {"ratio": 0.3, "max_downsample": 2}),
    ):
        variants = line_up([config], by_phase=True).variants.values()
        [peer] = [variant.install(copy_structure(model.unet)) for variant in variants if variant.kind == "tomesd"]
        assert expected.items() <= peer._tome_info["args"].items()


def test_another_accelerator_stays_on_its_copy(pipe: Any) -> None:
    pytest.importorskip("DeepCache")
    run = checks.runner(pipe, num_inference_steps=4)
    untouched = run()
    cached = benchmarking.twin(pipe, Variant("deepcache:cache_interval=2"))
    assert not torch.equal(checks.runner(cached, num_inference_steps=4)(), untouched)
    assert torch.equal(run(), untouched)


# Rounds, rows and tables.


def test_calls_take_turns() -> None:
    """One warm-up round, by other calls if need be, and rounds that count, of which whole ones are kept."""
    seen: list[str] = []
    told: list[Any] = []
    made = Session(progress=lambda *said: told.append(said)).begin("unet", CPU, {"model": "x"}, bases=["a"])
    calls = {name: functools.partial(seen.append, name) for name in "abc"}
    made.time({"size": 64, "batch": 2}, calls, 3)
    assert {row["method"]: row["rounds"] for row in made.results["rows"]} == {"a": 3, "b": 3, "c": 3}
    assert [sorted(seen[start : start + 3]) for start in range(0, 12, 3)] == [list("abc")] * 4
    assert told[-1] == ("64 pixels, batch 2", 12, 12)
    seen.clear()
    made.time({"size": 8}, {"a": calls["a"]}, 100, seconds=0, warm_up={"a": lambda: seen.append("x")})
    assert seen == ["x", "a"], "no round starts late, but one is run"

    def stop() -> None:
        calls["b"]()
        if seen.count("b") == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made.time({"size": 16}, {"a": calls["a"], "b": stop}, 5)
    assert [row["rounds"] for row in made.results["rows"] if row["size"] == 16] == [2, 2]
    [sitting] = made.results["groups"][-1]["sittings"]
    assert sitting["rounds"] == 2 and sitting["started"]


def test_published_tables_are_those_of_their_rounds() -> None:
    """Rows, what all of them share, parts, floors, and what names mean, as they stand in files that people read."""
    parts = [{"variant": name, "seconds": taken} for name, taken in (("untouched", 1.0), ("x/1", 3.0), ("x/2", 2.0))]
    for ending in ("", variants.COMPILED, variants.AUTOTUNED):
        own = [{**part, "variant": part["variant"] + ending} for part in parts]
        assert own_part({"method": f"x{ending}", "parts": own}) == own[2]
        assert own_part({"method": f"x{ending}", "parts": own[2:]}) is own_part({"method": "floor"}) is None
        found = [is_reference(name + ending) for name in ("untouched", "floor of 2 levels", "tome", "elfatt-fast")]
        assert found == [True, True, False, False]
    for table in sorted(PUBLISHED.glob("*.md")):
        if not (file := table.with_suffix(".json")).exists():
            continue
        data = json.loads(file.read_text())
        for part in data.get("parts", {"": data}).values():
            assert markdown(part) in table.read_text(), table.name
            if part["kind"] != "orders":  # whose rows are those of an earlier form
                assert json.loads(json.dumps(make_rows(part))) == part["rows"], table.name
        if "parts" in data:  # of the suite for GPUs, what follows from all of them
            assert all_goals(data["parts"]) == data["goals"] and memory_slopes(data["parts"]) == data["memory_slope"]


def test_a_table_fits_the_terminal() -> None:
    """Below it stands what is noise; so it does in files."""
    data = json.loads((PUBLISHED / "unet-512.json").read_text())
    assert "Faster than its floor" not in markdown(data)
    rows = {row["method"]: row for row in data["rows"]}
    rows["tome"]["floor"]["median"] = 0.9
    rows["agent"]["speed"]["untouched"] = {"median": 9.0, "min": 8.0, "max": 9.5}
    file = io.StringIO()
    show(data, Console(file=file, width=80, highlight=False))
    text = " ".join(file.getvalue().split())
    assert max(map(len, file.getvalue().splitlines())) <= 80
    assert "9.00 (8.00 to 9.50)" in text and "0.90" in text
    assert "nbsp" not in text and "|" not in text and "…" not in text
    for notes in (text, markdown(data).replace("`", "")):
        assert "Faster than its floor, which is noise (repeat with more rounds): tome." in notes
