"""What is plugged into a pipeline: ControlNets, T2I adapters, motion modules, LoRA, IP-Adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from support import tiny_pipelines as tiny
from support.checks import (
    TWO_PHASES,
    check_patch,
    layer_calls,
    like,
    patched_layers,
    picture,
    processors,
    recorded,
    runner,
)

import elfatt_sd
from elfatt_sd.runtime.processor import ElfattProcessor

BOTH_PHASES = {"elfatt": 2, "softmax": 2}


@pytest.fixture
def sd15(folder: Path) -> Any:
    return tiny.sd15(folder, scheduler=tiny.ddim())


def test_controlnet_follows_the_same_phases(sd15: Any) -> None:
    pipe = like(diffusers.StableDiffusionControlNetPipeline, sd15, controlnet=tiny.controlnet(sd15.unet))
    run = runner(pipe, image=picture())
    patched = check_patch(pipe, run, layers={"unet": 3, "controlnet": 1})
    elfatt_sd.apply_patch(pipe.unet, TWO_PHASES)  # the UNet alone
    assert not torch.equal(run(), patched)


def test_several_controlnets(sd15: Any) -> None:
    nets = [tiny.controlnet(sd15.unet), tiny.controlnet(sd15.unet)]
    pipe = like(diffusers.StableDiffusionControlNetPipeline, sd15, controlnet=nets)
    run = runner(pipe, image=[picture(), picture()])
    check_patch(pipe, run, layers={"unet": 3, "controlnet.0": 1, "controlnet.1": 1})


def test_controlnet_of_an_image_to_image_pipeline(sd15: Any) -> None:
    pipe = like(diffusers.StableDiffusionControlNetImg2ImgPipeline, sd15, controlnet=tiny.controlnet(sd15.unet))
    run = runner(pipe, image=picture(), control_image=picture(), strength=0.75, num_inference_steps=8)
    check_patch(pipe, run, layers={"unet": 3, "controlnet": 1}, calls=(2, 4))


def test_t2i_adapter(sd15: Any) -> None:
    pipe = like(diffusers.StableDiffusionAdapterPipeline, sd15, adapter=tiny.t2i_adapter())
    check_patch(pipe, runner(pipe, image=picture()), layers={"unet": 3})


def test_animatediff_motion_modules_are_untouched(sd15: Any) -> None:
    parts = {name: sd15.components[name] for name in ("vae", "text_encoder", "tokenizer", "unet", "scheduler")}
    pipe = tiny.quiet(diffusers.AnimateDiffPipeline(**parts, motion_adapter=tiny.motion_adapter()))
    before = processors(pipe)
    motion = {name for name in before if "motion_modules" in name}
    assert motion
    elfatt_sd.apply_patch(pipe, TWO_PHASES)
    after = processors(pipe)
    assert all(after[name] is before[name] for name in motion)
    assert sum(isinstance(found, ElfattProcessor) for found in after.values()) == 3
    elfatt_sd.remove_patch(pipe)
    assert check_patch(pipe, runner(pipe, num_frames=3), layers={"unet": 3}).shape == (1, 4, 3, 16, 16)


class TestLora:
    @pytest.fixture
    def lora(self, folder: Path) -> dict[str, torch.Tensor]:
        """Weights of a LoRA on the projections of every attention, as diffusers saves them."""
        from peft import LoraConfig
        from peft.utils import get_peft_model_state_dict

        model = tiny.unet()
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        model.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=targets, init_lora_weights=False))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_" in name:
                    weight.normal_(0, 0.3)
        return {f"unet.{name}": weight for name, weight in get_peft_model_state_dict(model).items()}

    def test_loaded_before_patching(self, sd15: Any, lora: Any) -> None:
        run = runner(sd15)
        elfatt_sd.apply_patch(sd15, TWO_PHASES)
        without = run()
        elfatt_sd.remove_patch(sd15)
        sd15.load_lora_weights(lora)
        assert not torch.allclose(check_patch(sd15, run, layers={"unet": 3}), without, atol=1e-2)

    def test_loaded_after_patching(self, sd15: Any, lora: Any) -> None:
        run, before = runner(sd15), processors(sd15)
        untouched = run()
        elfatt_sd.apply_patch(sd15, TWO_PHASES)
        without = run()
        sd15.load_lora_weights(lora)
        with recorded() as calls:
            patched = run()
        assert set(map(repr, layer_calls(sd15, calls).values())) == {repr(BOTH_PHASES)}
        assert not torch.allclose(patched, without, atol=1e-2)
        sd15.unload_lora_weights()
        assert torch.equal(run(), without)
        elfatt_sd.remove_patch(sd15)
        assert processors(sd15) == before
        assert torch.equal(run(), untouched)

    def test_fused_while_patched(self, sd15: Any, lora: Any) -> None:
        run = runner(sd15)
        elfatt_sd.apply_patch(sd15, TWO_PHASES)
        sd15.load_lora_weights(lora)
        patched = run()
        sd15.fuse_lora()
        assert torch.allclose(run(), patched, atol=1e-3)


class TestIPAdapter:
    """Loading and unloading rebuilds every processor of a UNet."""

    @pytest.fixture
    def pipe(self, sd15: Any) -> Any:
        sd15.register_modules(image_encoder=tiny.image_encoder(), feature_extractor=tiny.image_processor())
        return sd15

    @pytest.fixture
    def ip_run(self, pipe: Any) -> Any:
        return runner(pipe, ip_adapter_image=picture())

    def test_loaded_before_patching(self, pipe: Any, ip_run: Any) -> None:
        pipe.load_ip_adapter(tiny.ip_adapter(pipe.unet), subfolder=None, weight_name=None)
        patched = check_patch(pipe, ip_run, layers={"unet": 3})
        elfatt_sd.apply_patch(pipe, TWO_PHASES)
        pipe.set_ip_adapter_scale(0.0)
        assert not torch.allclose(ip_run(), patched, atol=1e-3)

    def test_loaded_after_patching_and_unloaded(self, pipe: Any, ip_run: Any) -> None:
        plain = runner(pipe)
        before = processors(pipe)
        untouched = plain()
        elfatt_sd.apply_patch(pipe, TWO_PHASES)
        without = plain()
        pipe.load_ip_adapter(tiny.ip_adapter(pipe.unet), subfolder=None, weight_name=None)
        with recorded() as calls:
            patched = ip_run()
        assert layer_calls(pipe, calls) == {f"unet.{name}": BOTH_PHASES for name in patched_layers(pipe)["unet"]}
        assert len(calls) == 6
        assert not torch.allclose(patched, without, atol=1e-3)
        pipe.unload_ip_adapter()
        assert torch.equal(plain(), without)
        elfatt_sd.remove_patch(pipe)
        after = processors(pipe)
        assert not any(isinstance(found, ElfattProcessor) for found in after.values())
        assert {name: type(found) for name, found in after.items()} == {
            name: type(found) for name, found in before.items()
        }
        assert torch.equal(plain(), untouched)

    def test_same_result_whatever_comes_first(self, pipe: Any, ip_run: Any) -> None:
        weights = tiny.ip_adapter(pipe.unet)
        elfatt_sd.apply_patch(pipe, TWO_PHASES)
        pipe.load_ip_adapter(weights, subfolder=None, weight_name=None)
        patch_first = ip_run()
        elfatt_sd.apply_patch(pipe, TWO_PHASES)
        assert torch.equal(ip_run(), patch_first)

    def test_removed_while_loaded(self, pipe: Any, ip_run: Any) -> None:
        pipe.load_ip_adapter(tiny.ip_adapter(pipe.unet), subfolder=None, weight_name=None)
        untouched = ip_run()
        pipe.unload_ip_adapter()
        pipe.register_modules(image_encoder=tiny.image_encoder(), feature_extractor=tiny.image_processor())
        elfatt_sd.apply_patch(pipe, TWO_PHASES)
        pipe.load_ip_adapter(tiny.ip_adapter(pipe.unet), subfolder=None, weight_name=None)
        elfatt_sd.remove_patch(pipe)
        assert torch.equal(ip_run(), untouched)
