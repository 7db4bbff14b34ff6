"""What is timed is what it is called: phases, copies, floors, the package tomesd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import Attention
from support import checks

from elfatt_sd.benchmarking import twin
from elfatt_sd.benchmarking.models import Model, unet_call
from elfatt_sd.benchmarking.variants import (
    VARIATIONS,
    Run,
    Variant,
    by_phase,
    fitted_methods,
    resolve_methods,
    same_work,
    single_phases,
    varied,
    whole,
    with_autotuned,
    with_compiled,
)
from elfatt_sd.config import METHODS, PatchConfig, Phase, for_transformers
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import copy_structure
from elfatt_sd.runtime.processor import ElfattProcessor


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (PatchConfig.preset("sd"), "untouched 50"),
        (PatchConfig.preset("tome"), "softmax 50"),
        (PatchConfig.preset("agent"), "agent 20, softmax 30"),
        (PatchConfig.preset("elfatt"), "elfatt 10, softmax 40"),
        (PatchConfig("x", (Phase(0.2), Phase(1.0, "block"))), "untouched 10, block 40"),
        (varied("elfatt-fast", attention_backend="flash"), "exact 10, sampled 40"),
        # Each n steps of a phase have one matching, made in the first of them; steps 8 and 9 merge as ELFATT.
        (varied("tome", reuse_steps=3), "softmax 17, softmax of 3 33"),
        (varied("elfatt", reuse_steps=4), "elfatt 3, elfatt of 4 7, softmax 11, softmax of 4 29"),
        (
            PatchConfig("late", (Phase(0.1), Phase(1.0, ratio=0.5)), reuse_steps=4),
            "untouched 5, softmax 12, softmax of 4 33",
        ),
        # Steps 10 and 11 are the rest of a group that shares a difference, which has to begin anew.
        (varied("elfatt-fast", residual_steps=4), "untouched 10, sampled measures 11, sampled 29"),
    ],
    ids=lambda value: getattr(value, "method", None),
)
def test_a_method_is_cut_into_calls(config: PatchConfig, said: str) -> None:
    """Calls that match, or measure a difference, are told from calls that use it again."""
    found = []
    for part, count in single_phases(config):
        name = "exact" if part.kind == "patch" else part.kind
        if part.config.phases:
            name = part.config.phases[0].attention.name
        kept = f" of {part.config.reuse_steps}" * (part.config.reuse_steps > 1) + " measures" * part.measures
        found.append(f"{name}{kept} {count}")
        assert all(phase.until == 1 for phase in part.config.phases)
    assert ", ".join(found) == said


def test_calls_that_keep_something_are_timed_beside_those_that_make_it() -> None:
    """Where nothing is merged nothing is reused."""
    lineup = by_phase(resolve_methods(["tome", varied("tome", reuse_steps=2), varied("elfatt-fast", residual_steps=4)]))
    assert lineup.runs["tome:reuse_steps=2"].parts == (("tome/0", 25), ("tome:reuse_steps=2/1", 25))
    reusing = lineup.variants["tome:reuse_steps=2/1"]
    assert reusing.reuses_steps and not lineup.variants["tome/0"].reuses_steps
    assert reusing.to_dict()["what"].endswith("softmax attention, matching kept for 2 steps")
    measuring, adding = (lineup.variants[f"elfatt-fast:residual_steps=4/{index}"] for index in (1, 2))
    assert adding.reuses_steps and not measuring.reuses_steps
    assert measuring.to_dict()["what"].endswith("corrected in between, a step that is exact")
    (exact, _), _ = single_phases(varied("elfatt-fast", attention_backend="flash"))
    assert exact.to_dict()["what"] == "exact attention, backend flash"
    both = varied("elfatt-fast", reuse_steps=2), PatchConfig.preset("elfatt-fast")
    (reusing, _), (plain, _) = (single_phases(config)[1] for config in both)
    assert reusing.same_work(plain)


def test_what_is_the_same_is_timed_once(methods: list[PatchConfig]) -> None:
    lineup = by_phase(methods)
    assert list(lineup.runs) == ["untouched", "tomesd", "tome", "elfatt", "fast", "floor", "floor of 2 levels"]
    assert lineup.runs["elfatt"] == Run((("elfatt/0", 10), ("tome/0", 40)), "floor")
    assert lineup.runs["fast"] == Run((("untouched", 10), ("fast/1", 40)), "floor of 2 levels")
    assert len(lineup.variants) == 7


def test_compiled_and_autotuned_twins(methods: list[PatchConfig]) -> None:
    """Compiled ones of all but tomesd, autotuned ones of what is patched."""
    plain = by_phase(methods)
    lineup = with_compiled(by_phase(methods))
    twins = {name.removesuffix(", compiled") for name, it in lineup.variants.items() if it.compiled}
    assert twins == plain.variants.keys() - {"tomesd"}
    parts = (("untouched, compiled", 10), ("fast/1, compiled", 40))
    assert lineup.runs["fast, compiled"] == Run(parts, "floor of 2 levels, compiled")
    assert "tomesd, compiled" not in lineup.runs
    lineup = with_autotuned(by_phase(methods))
    twins = {name.removesuffix(", autotuned") for name, it in lineup.variants.items() if it.autotune}
    assert twins == {"tome/0", "elfatt/0", "fast/1"}
    assert lineup.runs["fast, autotuned"] == Run((("untouched", 10), ("fast/1, autotuned", 40)), "floor of 2 levels")
    added = [name for name in lineup.runs if name.endswith(", autotuned")]
    assert added == ["tome, autotuned", "elfatt, autotuned", "fast, autotuned"]


def test_by_default_all_presets_and_the_variations_are_timed() -> None:
    """Each kind of work once, under the first of its names."""
    found = resolve_methods(None)
    assert {method for method in METHODS if method != "sd"} <= {config.method for config in found}
    for method, changes in VARIATIONS:
        assert any(same_work(config, varied(method, **changes)) for config in found)
    assert not any(same_work(one, two) for index, one in enumerate(found) for two in found[:index])
    floors = {run.floor for run in by_phase(found).runs.values()}
    assert {"floor", "floor of 2 levels"} <= floors


def test_a_variation_is_named_after_its_settings() -> None:
    config = varied("elfatt-fast", block_size=512, levels=2)
    assert config.method == "elfatt-fast:block_size=512,levels=2"
    assert same_work(config, PatchConfig.preset("elfatt-fast", block_size=512, levels=2))
    fitted = for_transformers(varied("elfatt-fast", block_size=64))
    assert fitted == for_transformers(PatchConfig.preset("elfatt-fast", block_size=64)).renamed(fitted.method)
    assert fitted.method == "elfatt-fast:block_size=64"
    assert fitted.phases[1].attention.name == "cell_spread"
    [config] = resolve_methods(["sampled"])  # an attention alone follows exact steps
    assert [phase.attention.name for phase in config.phases] == ["softmax", "sampled"]
    assert varied("sampled", block_size=64).phases[1].block_size == 64
    with pytest.raises(ElfattError, match="'quick'"):
        resolve_methods(["quick"])


def test_the_ratio_changes_methods_that_merge() -> None:
    tome, fast = resolve_methods(["tome", "elfatt-fast"], ratio=0.25)
    assert tome.phases[0].ratio == 0.25
    assert fast == PatchConfig.preset("elfatt-fast")
    everything = resolve_methods(None, ratio=0.25, seed=3)
    assert {config.seed for config in everything} == {3}
    ratios = {config.method: phase.ratio for config in everything for phase in config.phases if phase.ratio}
    assert ratios["tome:reuse_steps=2"] == 0.25
    assert {*ratios.values()} == {0.25}
    assert "elfatt:ratio=0" not in ratios


def processors(unet: Any) -> dict[str, str]:
    return {
        name: type(module.processor).__name__
        for name, module in unet.named_modules()
        if isinstance(module, Attention) and name.endswith("attn1")
    }


def test_copies_share_weights_and_nothing_else(model: Model) -> None:
    before = processors(model.unet)
    copy = copy_structure(model.unet)
    for mine, theirs in zip(copy.parameters(), model.unet.parameters(), strict=True):
        assert mine is theirs
    Variant("patch", PatchConfig.preset("tome")).install(copy)
    assert ElfattProcessor.__name__ in processors(copy).values()
    assert processors(model.unet) == before


@pytest.mark.parametrize(("levels", "layers"), [(1, 3), (2, 7)])
def test_floor_removes_the_layers_that_are_patched(model: Model, levels: int, layers: int) -> None:
    config = PatchConfig("x", (Phase(1.0, "block"),), levels=levels)
    name = by_phase([config]).runs["x"].floor
    assert name is not None
    floor = by_phase([config]).variants[name].install(copy_structure(model.unet))
    patched = Variant("patch", config).install(copy_structure(model.unet))
    removed = {name for name, kind in processors(floor).items() if kind == "NoAttention"}
    assert removed == {name for name, kind in processors(patched).items() if kind == "ElfattProcessor"}
    assert len(removed) == layers
    x = torch.randn(2, 64, 16)
    attention = floor.get_submodule(next(iter(removed)))
    assert torch.equal(attention(x), torch.zeros_like(x))


def test_tomesd_can_be_asked_for_alone(model: Model) -> None:
    lineup = by_phase(resolve_methods(["tomesd", "elfatt-fast"]))
    assert list(lineup.runs)[:3] == ["untouched", "tomesd", "elfatt-fast"]
    assert lineup.variants["tomesd"].kind == "tomesd"
    assert "tome" not in lineup.runs
    [_, changed, _] = by_phase([varied("tomesd", ratio=0.7, stride=4, use_rand=False)]).variants.values()
    assert changed.kind == "tomesd"
    options = changed.install(copy_structure(model.unet))._tome_info["args"]
    assert (options["ratio"], options["sx"], options["sy"], options["use_rand"]) == (0.7, 4, 4, False)
    both = by_phase(resolve_methods(["tomesd", "tome"]))
    assert list(both.runs) == ["untouched", "tomesd", "tome", "floor"]
    deep = by_phase([PatchConfig.preset("tome", ratio=0.3, max_downsample=2)])
    assert deep.runs["tome"].floor == "floor to 1/2"
    peer = deep.variants["tomesd"].install(copy_structure(model.unet))
    assert (peer._tome_info["args"]["ratio"], peer._tome_info["args"]["max_downsample"]) == (0.3, 2)
    assert any(type(module).__name__ == "ToMeBlock" for module in peer.modules())


def test_models_of_random_weights_can_be_called(model: Model) -> None:
    """Also with the least image, which every level can halve."""
    inputs = model.inputs(128, 2)
    assert inputs["sample"].shape == (2, 4, 16, 16)
    out = unet_call(model.unet, inputs)()
    assert out.isfinite().all() and out.std() > 1e-3
    inputs = model.inputs(model.least_size, 1)
    assert unet_call(model.unet, inputs)().shape == inputs["sample"].shape


def test_other_accelerators_are_timed_over_a_whole_run() -> None:
    configs = resolve_methods([varied("deepcache", cache_interval=2), "deepcache", "tgate", "elfatt-fast"])
    lineup = whole(configs)
    assert lineup.runs["elfatt-fast"].parts == (("elfatt-fast", 50),), "a whole run is one variant"
    assert list(lineup.runs)[:4] == ["untouched", "deepcache:cache_interval=2", "deepcache", "tgate"]
    assert [lineup.runs[name].parts[0][0] for name in ("deepcache", "tgate")] == ["deepcache", "tgate"]
    with pytest.raises(ElfattError, match="deepcache:cache_interval=2 is timed over a whole run"):
        by_phase(configs)
    with pytest.raises(ElfattError, match="setting 'interval' of deepcache"):
        varied("deepcache", interval=2)
    assert not {name for name in with_compiled(lineup).variants if name.startswith("deepcache") and "compiled" in name}


def test_another_accelerator_stays_on_its_copy(pipe: Any) -> None:
    pytest.importorskip("DeepCache")
    run = checks.runner(pipe, num_inference_steps=4)
    untouched = run()
    cached = twin(pipe, Variant("deepcache:cache_interval=2"))
    assert not torch.equal(checks.runner(cached, num_inference_steps=4)(), untouched)
    assert torch.equal(run(), untouched)


def test_a_setting_that_a_named_method_has_not_is_told(model: Model) -> None:
    with pytest.warns(UserWarning, match="method 'elfatt-fast:stride=3' has no setting stride"):
        fitted_methods([varied("elfatt-fast", stride=3)], model.unet, named=True)
    with pytest.warns(UserWarning, match="with ratio=0, method 'tome:ratio=0' approximates nothing"):
        fitted_methods([varied("tome", ratio=0)], model.unet, named=True)
