"""Benchmarks of a whole pipeline."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.attention_processor import Attention
from support import tiny_transformers
from support.checks import QUICK, check_saved

import elfatt_sd.benchmarking.pipeline as pipeline_bench
from elfatt_sd.benchmarking.models import make_pipeline
from elfatt_sd.benchmarking.names import FLOOR
from elfatt_sd.benchmarking.pipeline import pipeline, twin
from elfatt_sd.benchmarking.variants import Variant
from elfatt_sd.config import PatchConfig
from elfatt_sd.phases import Phase
from elfatt_sd.runtime.joint_processor import JointProcessor
from elfatt_sd.runtime.processor import ElfattProcessor


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_pipeline_with_random_weights(
    name: str, small_shapes: None, methods: list[PatchConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: dict[int, set[str]] = {}
    original = pipeline_bench._run

    def run(pipe: Any, *args: Any) -> Any:
        kinds = {type(module).__name__ for module in pipe.unet.modules()} | set(processors(pipe.unet).values())
        ran[id(pipe.unet)] = kinds & {"ToMeBlock", ElfattProcessor.__name__}
        return original(pipe, *args)

    monkeypatch.setattr(pipeline_bench, "_run", run)
    results = pipeline(name, sizes=[64], methods=methods, steps=5, **QUICK)
    assert sorted(map(sorted, ran.values())) == [[], [], [], *[[ElfattProcessor.__name__]] * 3, ["ToMeBlock"]]
    names = ["untouched", "tomesd", "tome", "elfatt", "fast", "floor", "floor of 2 levels"]
    assert [row["method"] for row in results["rows"]] == names
    assert results["settings"]["steps"] == 5
    peaks = {row["method"]: row["peak_bytes"] for row in results["rows"]}
    assert peaks.pop("floor") is peaks.pop("floor of 2 levels") is None
    assert all(peak > 64 * 64 * 3 * 4 for peak in peaks.values()), "the picture at least"
    check_saved(results, tmp_path)


def test_what_is_no_image_is_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    output = SimpleNamespace(images=torch.full((1, 3, 8, 8), torch.nan))
    monkeypatch.setattr(pipeline_bench, "_run", lambda *_: output)
    with pytest.warns(UserWarning, match="elfatt-sd: tome: the image is not finite"):
        pipeline_bench._look("tome", None, {}, 64, 2)


def test_a_transformer_is_timed_at_its_own_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its configuration does not name one; the pipeline does."""
    pipe = tiny_transformers.flux(folder)
    pipe.default_sample_size = 8
    pipe.vae.register_to_config(shift_factor=0.0)
    monkeypatch.setattr(pipeline_bench, "make_pipeline", lambda *_: (pipe, {"prompt": ["a red circle"]}))
    results = pipeline("x", steps=5, **QUICK)
    sizes = {row["method"]: row["size"] for row in results["rows"]}
    assert {"untouched", "elfatt-fast", "floor"} <= set(sizes), "as they are on transformers, where one level is all"
    assert not {"tome", "tomesd", "floor of 2 levels"} & set(sizes)
    assert set(sizes.values()) == {8 * pipe.vae_scale_factor}


def processors(unet: Any) -> dict[str, str]:
    modules = unet.named_modules()
    return {name: type(module.processor).__name__ for name, module in modules if isinstance(module, Attention)}


def test_twins_leave_the_pipeline_alone(small_shapes: None, methods: list[PatchConfig], cpu: torch.device) -> None:
    """Each has its own UNet with the same weights, and finds its own scheduler."""
    pipe, inputs = make_pipeline("sd15", cpu, torch.float32, 1)
    unet, before = pipe.unet, processors(pipe.unet)
    patched, peer = twin(pipe, Variant("patch", methods[1])), twin(pipe, Variant("tomesd", methods[0]))
    assert ElfattProcessor.__name__ in processors(patched.unet).values()
    assert any(type(module).__name__ == "ToMeBlock" for module in peer.unet.modules())
    assert pipe.unet is unet
    assert processors(unet) == before
    assert patched.unet.conv_in.weight is unet.conv_in.weight
    patched.set_progress_bar_config(disable=True)
    options: dict[str, Any] = {"num_inference_steps": 5, "height": 64, "width": 64, "output_type": "latent"}
    assert patched(**inputs, **options).images.isfinite().all()


@pytest.mark.skipif(not hasattr(diffusers, "WanPipeline"), reason="this version of diffusers has no Wan")
def test_twins_have_their_own_second_transformer() -> None:
    """Wan 2.2 has two, which take turns: both are patched or left out, and those of the pipeline are as before."""
    pipe, _ = tiny_transformers.wan(second=True)
    config = PatchConfig("spread", (Phase(1.0, "cell_spread", block_size=8),))
    for variant in (Variant("patch", config), Variant(FLOOR, config)):
        other = twin(pipe, variant)
        for part in ("transformer", "transformer_2"):
            own, original = ([block.attn1.processor for block in getattr(each, part).blocks] for each in (other, pipe))
            assert all(isinstance(processor, JointProcessor) for processor in own), variant.kind
            assert not any(isinstance(processor, JointProcessor) for processor in original)
