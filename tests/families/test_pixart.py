"""PixArt, the second family: the same methods, plans and measurements on a small random pipeline's own `__call__`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from support import tiny_transformers
from support.checks import generator, recorded

import elfatt_sd
from elfatt_sd import METHODS, ElfattError, PatchConfig, Phase
from elfatt_sd.families import family_of, find_denoisers, find_layers
from elfatt_sd.methods import Grid, attentions, is_own

OWN = [name for name, kind in attentions().items() if is_own(kind) and not kind.empty]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_transformers.pixart(tmp_path_factory.mktemp("pixart"))


@pytest.fixture
def pixart(made: Any) -> Iterator[Any]:
    yield made
    elfatt_sd.remove_patch(made)


def latents(pipe: Any, steps: int = 4, **options: Any) -> torch.Tensor:
    given = {"height": 64, "width": 48, "guidance_scale": 3.0, "use_resolution_binning": False, **options}
    made: torch.Tensor = pipe(
        "a b", num_inference_steps=steps, generator=generator(), output_type="latent", clean_caption=False, **given
    ).images
    return made


def test_layers_and_grid(pixart: Any) -> None:
    layers = find_layers(pixart.transformer)
    assert [layer.name for layer in layers] == ["transformer_blocks.0.attn1", "transformer_blocks.1.attn1"]
    assert layers[0].grid(Grid.image(32, 24)) == (1, 16, 12)
    assert find_denoisers(pixart) == {"transformer": pixart.transformer}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_and_is_taken_back(pixart: Any, method: Any) -> None:
    before = dict(pixart.transformer.attn_processors)
    untouched = latents(pixart)
    with recorded() as calls, elfatt_sd.patched(pixart, method, active_fraction=0.5):
        found = latents(pixart)
    assert bool(calls) == (method != "sd")
    assert torch.equal(found, untouched) == (method == "sd")
    assert torch.isfinite(found).all()
    assert dict(pixart.transformer.attn_processors) == before
    assert torch.equal(latents(pixart), untouched)


@pytest.mark.filterwarnings("ignore:elfatt-sd. no token of 16x12 can be merged")
@pytest.mark.parametrize("attention", OWN)
def test_what_sees_all_tokens_is_exact(pixart: Any, attention: Any) -> None:
    """One block, one cell, every key sampled; agents are never exact."""
    if attention in ("agent", "elfatt"):
        pytest.skip("agents are an approximation at any number")
    untouched = latents(pixart)
    phase = Phase(1.0, attention, block_size=192, **({"groups": 1} if attention == "sampled" else {}))
    if phase.exact:
        phase = Phase(1.0, attention, ratio=0.001)
    elfatt_sd.apply_patch(pixart, PatchConfig("all", (phase,)))
    torch.testing.assert_close(latents(pixart), untouched, atol=1e-4, rtol=0)


@pytest.mark.parametrize("steps", [1, 4, 20])
def test_phases_follow_the_true_step(pixart: Any, steps: int) -> None:
    config = PatchConfig("half", (Phase(0.5, "sampled", keys=16),))
    elfatt_sd.apply_patch(pixart, config)
    with recorded() as calls:
        latents(pixart, steps)
        latents(pixart, steps)
    assert set(calls.values()) == {2 * sum(step < 0.5 * steps for step in range(steps))}


def test_forward_alone_is_a_call(pixart: Any) -> None:
    transformer = pixart.transformer
    arguments = family_of(transformer).arguments(transformer, Grid.image(16, 16), 1, torch.zeros)
    elfatt_sd.apply_patch(transformer, PatchConfig("all", (Phase(1.0, "sampled", keys=8),)))
    with recorded() as calls, torch.no_grad():
        transformer.forward(**arguments)
    assert sum(calls.values()) == 2


def test_plan_counts_and_autotune(pixart: Any) -> None:
    plan = elfatt_sd.plan(pixart, "elfatt-fast", height=64, width=48)
    assert [(layer.tokens, layer.patched) for layer in plan.layers] == [(192, True)] * 2
    assert plan.call.before is not None
    assert json.loads(json.dumps(plan.to_dict()))["layers"][0]["denoiser"] == "transformer"
    tuned = elfatt_sd.plan(pixart, "elfatt-fast", height=64, width=48, autotune=True)
    assert "measured here" in str(tuned)
    with elfatt_sd.patched(pixart, "elfatt-fast", autotune=True):
        latents(pixart)


def test_merging_by_similarity_reads_the_blocks_input(pixart: Any) -> None:
    elfatt_sd.apply_patch(pixart, "tome")
    seen: list[bool] = []
    layer: Any = find_layers(pixart.transformer)[0].attention.elfatt_state
    layer.layer.attention.to_q.register_forward_pre_hook(
        lambda *_: seen.append(layer.state.candidates is not None or layer.state.block_input is not None)
    )
    latents(pixart, 2)
    assert seen
    assert all(seen)


def test_a_processor_that_is_not_known_is_left_alone(pixart: Any) -> None:
    class Other(AttnProcessor2_0):
        pass

    attention = pixart.transformer.transformer_blocks[0].attn1
    original = attention.processor
    attention.set_processor(Other())
    try:
        with pytest.warns(UserWarning, match="1 layers are left alone"):
            elfatt_sd.apply_patch(pixart, "tome")
    finally:
        elfatt_sd.remove_patch(pixart)
        attention.set_processor(original)


def test_transformers_of_no_known_family_are_refused_by_name(tmp_path: Path) -> None:
    from diffusers import DiTTransformer2DModel

    other = DiTTransformer2DModel(num_attention_heads=1, attention_head_dim=4, num_layers=1, norm_num_groups=1)

    pipeline = SimpleNamespace(transformer=other, components={"transformer": other})
    with pytest.raises(ElfattError, match="not supported: DiTTransformer2DModel cannot be patched"):
        elfatt_sd.apply_patch(pipeline, "tome")


def test_it_is_timed_in_benches(pixart: Any, tmp_path: Path) -> None:
    """Beside its floor, and without tomesd, which patches UNets alone."""
    from elfatt_sd.benchmarking import pipeline, unet

    pixart.save_pretrained(tmp_path / "pixart")
    options: dict[str, Any] = {"methods": ["tome", "elfatt-fast"], "repeats": 1, "device": "cpu"}
    for rows in (
        unet(str(tmp_path / "pixart"), sizes=[32], memory=[], **options)["rows"],
        pipeline(str(tmp_path / "pixart"), sizes=[32], steps=2, memory=False, **options)["rows"],
    ):
        assert {"untouched", "tome", "elfatt-fast"} <= {row["method"] for row in rows}
        assert all(row["seconds"] > 0 for row in rows)
        assert "tomesd" not in {row["method"] for row in rows}
