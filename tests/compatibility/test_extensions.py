"""What is around a UNet: ControlNets, adapters, motion modules, LoRA, IP-Adapters, offload, wrappers of training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import diffusers
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
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
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import unwrap
from elfatt_sd.runtime.processor import ElfattProcessor

BOTH_PHASES = {"elfatt": 2, "softmax": 2}


@pytest.fixture
def sd15(folder: Path) -> Any:
    return tiny.sd15(folder, scheduler=tiny.ddim())


CONTROLNETS: dict[str, tuple[str, int, dict[str, Any], tuple[int, int]]] = {  # its kind, nets, what it is given, calls
    "one": ("StableDiffusionControlNetPipeline", 1, {"image": picture()}, (2, 2)),
    "two": ("StableDiffusionControlNetPipeline", 2, {"image": [picture(), picture()]}, (2, 2)),
    "image to image": (
        "StableDiffusionControlNetImg2ImgPipeline",
        1,
        {"image": picture(), "control_image": picture(), "strength": 0.75, "num_inference_steps": 8},
        (2, 4),
    ),
}


@pytest.mark.parametrize("name", CONTROLNETS)
def test_controlnets_follow_the_same_phases(sd15: Any, name: str) -> None:
    kind, count, given, calls = CONTROLNETS[name]
    nets = [tiny.controlnet(sd15.unet) for _ in range(count)]
    pipe = like(getattr(diffusers, kind), sd15, controlnet=nets if count > 1 else nets[0])
    run, names = runner(pipe, **given), ["controlnet"] if count == 1 else ["controlnet.0", "controlnet.1"]
    patched = check_patch(pipe, run, layers={"unet": 3, **dict.fromkeys(names, 1)}, calls=calls)
    elfatt_sd.apply_patch(pipe.unet, TWO_PHASES)  # the UNet alone
    assert not torch.equal(run(), patched)


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


CPU = torch.device("cpu")


def lora_weights() -> dict[str, torch.Tensor]:
    """A LoRA on the projections of every attention, as diffusers saves it."""
    torch.manual_seed(0)
    model = tiny.unet()
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    model.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=targets, init_lora_weights=False))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_(0, 0.3)
    return {f"unet.{name}": weight for name, weight in get_peft_model_state_dict(model).items()}


def lora(pipe: Any) -> Any:
    pipe.load_lora_weights(lora_weights())
    return pipe.unload_lora_weights


def ip_adapter(pipe: Any) -> Any:
    """Loading and unloading rebuilds every processor of a UNet."""
    pipe.register_modules(image_encoder=tiny.image_encoder(), feature_extractor=tiny.image_processor())
    pipe.load_ip_adapter(tiny.ip_adapter(pipe.unet), subfolder=None, weight_name=None)
    return pipe.unload_ip_adapter


def sequential(pipe: Any) -> Any:
    """Every layer's weights are on the meta device but while it runs, as in sequential offload."""
    for part in (pipe.unet, pipe.vae, pipe.text_encoder):
        accelerate.cpu_offload(part, execution_device=CPU)
    assert {weight.device.type for weight in pipe.unet.parameters()} == {"meta"}
    return lambda: None


def whole(pipe: Any) -> Any:
    """Model offload, as the pipeline switches it on."""
    pipe.enable_model_cpu_offload(device=CPU)
    assert isinstance(pipe.unet._hf_hook, accelerate.hooks.CpuOffload)
    return lambda: None


# What is put around a pipeline, what its call is given then, and how far its image is at least from the one without.
EXTENSIONS: dict[str, tuple[Any, dict[str, Any], float | None]] = {
    "LoRA": (lora, {}, 1e-2),
    "IP-Adapter": (ip_adapter, {"ip_adapter_image": picture()}, 1e-3),
    "sequential offload": (sequential, {}, None),
    "model offload": (whole, {}, None),
}


@pytest.mark.parametrize("name", EXTENSIONS)
def test_whatever_comes_first(folder: Path, name: str) -> None:
    """Before the patch or after it, the image is the same; without each of them, it is what it was."""
    put, given, far = EXTENSIONS[name]
    pipe, other = (tiny.sd15(folder, scheduler=tiny.ddim()) for _ in range(2))
    plain, before = runner(pipe), processors(pipe)
    untouched = plain()
    elfatt_sd.apply_patch(pipe, TWO_PHASES)
    without = plain()
    take_out = put(pipe)
    with recorded() as calls:
        patch_first = runner(pipe, **given)()
    assert layer_calls(pipe, calls) == {f"unet.{name}": BOTH_PHASES for name in patched_layers(pipe)["unet"]}
    assert len(calls) == 6
    assert torch.equal(patch_first, without) if far is None else not torch.allclose(patch_first, without, atol=far)
    take_out()
    assert torch.equal(plain(), without)
    elfatt_sd.remove_patch(pipe)
    after = processors(pipe)
    assert {name: type(found) for name, found in after.items()} == {name: type(each) for name, each in before.items()}
    assert name == "IP-Adapter" or all(after[name] is found for name, found in before.items())
    assert torch.equal(plain(), untouched)
    put(other)
    assert torch.equal(check_patch(other, runner(other, **given), layers={"unet": 3}), patch_first)


def test_an_ip_adapter_of_a_patched_pipeline_stays_when_the_patch_goes(folder: Path) -> None:
    pipe, other = (tiny.sd15(folder, scheduler=tiny.ddim()) for _ in range(2))
    elfatt_sd.apply_patch(pipe, TWO_PHASES)
    ip_adapter(pipe)
    elfatt_sd.remove_patch(pipe)
    ip_adapter(other)
    given = {"ip_adapter_image": picture()}
    assert torch.equal(runner(pipe, **given)(), runner(other, **given)())


def test_a_lora_that_is_fused_while_patched(sd15: Any) -> None:
    run = runner(sd15)
    elfatt_sd.apply_patch(sd15, TWO_PHASES)
    lora(sd15)
    patched = run()
    sd15.fuse_lora()
    assert torch.allclose(run(), patched, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize("offload", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_pipeline_offload(sd15: Any, folder: Path, offload: str, patch_first: bool) -> None:
    """It makes what the same pipeline makes whose weights are all on the GPU."""
    pipe = sd15
    there = tiny.sd15(folder, scheduler=tiny.ddim()).to("cuda")
    elfatt_sd.apply_patch(there, TWO_PHASES)
    if patch_first:
        elfatt_sd.apply_patch(pipe, TWO_PHASES)
    getattr(pipe, offload)()
    if not patch_first:
        elfatt_sd.apply_patch(pipe, TWO_PHASES)
    torch.testing.assert_close(runner(pipe)().cpu(), runner(there)().cpu(), atol=1e-3, rtol=0)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=(tmp_path / "rendezvous").as_uri(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def with_lora(unet: Any) -> Any:
    return get_peft_model(unet, LoraConfig(r=4, target_modules=["to_q", "to_v"]))


class Mine(torch.nn.Module):
    """A wrapper that shows the attributes of what it holds, as many do."""

    def __init__(self, unet: Any) -> None:
        super().__init__()
        self.held = unet

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "held" else getattr(self.held, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.held(*args, **kwargs)


class Guided(torch.nn.Module):
    """A wrapper with weights of its own, around another one."""

    def __init__(self, unet: Any) -> None:
        super().__init__()
        self.inner = torch.nn.ModuleDict({"model": Mine(unet)})
        self.scale = torch.nn.Linear(1, 1)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner["model"](*args, **kwargs)


WRAPPERS = [
    torch.nn.DataParallel,
    with_lora,
    torch.nn.parallel.DistributedDataParallel,
    Mine,
    Guided,
    lambda unet: Guided(torch.compile(unet, backend="eager")),
    torch.optim.swa_utils.AveragedModel,
]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_wrapped_unet_is_patched_and_put_back(wrap: Any, process_group: None) -> None:
    wrapped = wrap(tiny.unet())
    unet = unwrap(wrapped)
    before = dict(unet.attn_processors)
    sample, text = torch.randn(1, 4, 16, 16), torch.randn(1, 5, tiny.TEXT_WIDTH)
    with torch.no_grad():
        exact = wrapped(sample, 999, text).sample
        assert elfatt_sd.apply_patch(wrapped, "elfatt") is wrapped
        with recorded() as calls:
            assert not torch.equal(wrapped(sample, 999, text).sample, exact)
        assert len(calls) == 3
        assert elfatt_sd.plan(wrapped, "elfatt").layers[0].tokens == 256
        elfatt_sd.remove_patch(wrapped)
        assert torch.equal(wrapped(sample, 999, text).sample, exact)
    assert all(unet.attn_processors[name] is processor for name, processor in before.items())


class Training(torch.nn.Module):
    """What a trainer is given: several models, by the names that pipelines have for them, or by others."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def test_a_module_with_the_parts_of_a_pipeline() -> None:
    unet = tiny.unet()
    module = Training(unet=unet, controlnet=tiny.controlnet(unet), vae=tiny.vae())
    elfatt_sd.apply_patch(module, "tome")
    assert elfatt_sd.is_patched(unet) and elfatt_sd.is_patched(module.controlnet)
    elfatt_sd.remove_patch(module)
    assert not elfatt_sd.is_patched(module)


def test_what_holds_several_denoisers_or_none_is_told_so(folder: Path) -> None:
    unet = tiny.unet()
    with pytest.raises(ElfattError, match=r"student \(UNet2DConditionModel\), teacher \(UNet2DConditionModel\); give"):
        elfatt_sd.apply_patch(Training(student=unet, teacher=tiny.unet(), vae=tiny.vae()), "tome")
    pipe = tiny.sd15(folder)
    object.__setattr__(pipe, "unet", lambda *args, **kwargs: unet(*args, **kwargs))
    with pytest.raises(ElfattError, match="unet, which is a function and no module of PyTorch"):
        elfatt_sd.apply_patch(pipe, "tome")


def test_a_peft_model_in_a_pipeline(folder: Path) -> None:
    pipe = tiny.sd15(folder)
    exact = runner(pipe)()
    pipe.unet = with_lora(pipe.unet)
    with elfatt_sd.patched(pipe, "tome") as plan:
        assert sum(layer.patched for layer in plan.layers) == 3
        assert not torch.equal(runner(pipe)(), exact)
    assert torch.equal(runner(pipe)(), exact)


def test_controlnet_xs_is_told_the_truth(folder: Path) -> None:
    unet = tiny.unet(layers_per_block=2)
    net = diffusers.ControlNetXSAdapter.from_unet(
        unet, size_ratio=1.0, num_attention_heads=2, conditioning_embedding_out_channels=(8, 8)
    )
    parts = {**tiny.sd15_parts(folder), "unet": unet}
    pipe = diffusers.StableDiffusionControlNetXSPipeline(**parts, controlnet=net, requires_safety_checker=False)
    with pytest.raises(ElfattError, match="not supported: UNetControlNetXSModel"):
        elfatt_sd.apply_patch(pipe, "elfatt")
