"""What else a user has on, one row each: with all keys seen nothing changes, whoever came first, and all goes back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from operator import methodcaller
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import accelerate
import diffusers
import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from support import checks, tiny_transformers
from support import tiny_pipelines as tiny
from support.checks import all_layers, generator, like, picture, processors, recorded, runner

import elfatt_sd
from elfatt_sd.config import PatchConfig, Phase
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import family_of, main_denoiser, unwrap

CPU = torch.device("cpu")
STEPS = 6  # of a transformer; a UNet has four
FIRST, SECOND = "cell_spread", "block"
ALL = PatchConfig("all", (dataclasses.replace(checks.ALL_KEYS[FIRST], until=0.5), checks.ALL_KEYS[SECOND]), levels=9)
SHARED = PatchConfig("shared", (dataclasses.replace(checks.ALL_KEYS[FIRST], residual_steps=3),))
FEW = PatchConfig("few", (checks.FEW_KEYS[FIRST],))
THREE_PHASES = PatchConfig("three", (Phase(0.25, "sampled", keys=16, groups=4), *checks.TWO_PHASES.phases))
Make = Callable[[Path], tuple[Any, Callable[..., torch.Tensor]]]  # what is patched, and a function that draws with it
Put = Callable[[Any], Any]  # returns a function that takes it out again, where there is one


class Row(NamedTuple):
    """What is patched, what is put on it, and what that does."""

    make: Make
    put: Put | None = None
    changes: Literal["nothing", "rounding", "image"] = "nothing"
    layers: int = 3  # that are patched by default
    calls: tuple[int, int] = (2, 2)  # of each layer in both halves of the steps
    given: Mapping[str, Any] = MappingProxyType({})  # to a call, once that is put on
    few: PatchConfig = checks.TWO_PHASES
    spares: bool = False  # some of the calls


# Pipelines and models with UNets.


def drawn(make: Callable[[Path], Any], **fixed: Any) -> Make:
    def made(folder: Path) -> Any:
        pipe = make(folder)
        return pipe, lambda **given: runner(pipe, **fixed, **given)()

    return made


def sd15(folder: Path) -> Any:
    return tiny.sd15(folder, scheduler=tiny.ddim())


def kind(name: str, **given: Any) -> Make:
    """Another kind of pipeline around the same models; some have a part or a UNet of their own."""
    own = {part: given.pop(part) for part in ("unet", "controlnet", "adapter") if part in given}

    def make(folder: Path) -> Any:
        parts = {part: value() for part, value in own.items()}
        return like(getattr(diffusers, f"StableDiffusion{name}Pipeline"), sd15(folder), **parts)

    return drawn(make, **given)


def refiner(folder: Path) -> Any:
    given = {"requires_aesthetics_score": True, "add_watermarker": False}
    return tiny.quiet(diffusers.StableDiffusionXLImg2ImgPipeline(**tiny.sdxl_parts(folder, refiner=True), **given))


def upscaler(folder: Path) -> Any:
    """The finest level has no self-attention."""
    parts = tiny.sd15_parts(folder, in_channels=7, only_cross_attention=(True, False, False), num_class_embeds=1000)
    parts |= {"low_res_scheduler": diffusers.DDPMScheduler(), "scheduler": tiny.ddim()}
    parts["vae"].register_to_config(scaling_factor=0.08333)
    return tiny.quiet(diffusers.StableDiffusionUpscalePipeline(**parts))


def animatediff(folder: Path) -> Any:
    """Its motion modules stay as they are."""
    return like(diffusers.AnimateDiffPipeline, sd15(folder), motion_adapter=tiny.motion_adapter())


def unconditional(folder: Path) -> Any:
    pipe = tiny.quiet(diffusers.DDIMPipeline(picture_unet(), tiny.ddim()))
    given = {"num_inference_steps": 4, "output_type": "numpy", "return_dict": False}
    return pipe, lambda: torch.as_tensor(pipe(generator=generator(), **given)[0])


def picture_unet() -> Any:
    """A UNet without text, whose attention takes pictures `[batch, channels, height, width]` and normalises them."""
    torch.manual_seed(0)
    config: dict[str, Any] = {"block_out_channels": (16, 32), "norm_num_groups": 4, "attention_head_dim": 8}
    config |= {"down_block_types": ("AttnDownBlock2D",) * 2, "up_block_types": ("AttnUpBlock2D",) * 2}
    config |= {"sample_size": 16, "layers_per_block": 1, "resnet_time_scale_shift": "scale_shift"}
    return diffusers.UNet2DModel(**config).eval()


def bare(make: Callable[[], Any], *shape: int, text: int = 5, **named: Any) -> Make:
    """A model in a loop of one's own over four steps; without a shape, a UNet of latents with text."""

    def made(folder: Path) -> Any:
        model, scheduler = make(), tiny.ddim()
        scheduler.set_timesteps(4)
        sample = torch.randn(shape or (3, 4, 16, 16), generator=generator())
        states = (torch.randn(len(sample), text, tiny.TEXT_WIDTH, generator=generator()),) if text else ()
        return model, torch.no_grad()(
            lambda: torch.stack([model(sample, each, *states, **named).sample for each in scheduler.timesteps])
        )

    return made


def video_unet() -> Any:
    """It attends over frames as before."""
    torch.manual_seed(0)
    config: dict[str, Any] = {"sample_size": 8, "in_channels": 8, "block_out_channels": (32, 32), "layers_per_block": 1}
    config |= {"down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal")}
    config |= {"up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"), "num_attention_heads": 2}
    config |= {"cross_attention_dim": tiny.TEXT_WIDTH, "addition_time_embed_dim": 8}
    return diffusers.UNetSpatioTemporalConditionModel(**config, projection_class_embeddings_input_dim=24).eval()


# What is put on.


def lora(pipe: Any) -> Any:
    """On projections of attentions, as diffusers saves and loads it."""
    net = main_denoiser(pipe)
    twin, name = type(net).from_config(net.config), "unet" if hasattr(pipe, "unet") else "transformer"
    torch.manual_seed(0)
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    twin.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=targets, init_lora_weights=False))
    weights = get_peft_model_state_dict(twin)
    own = {f"{name}.{place}": torch.randn(weight.shape) * 0.3 for place, weight in weights.items()}
    pipe.load_lora_weights(own, adapter_name="one")
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


def whole(pipe: Any) -> Any:
    pipe.enable_model_cpu_offload(device=CPU)
    assert isinstance(pipe.unet._hf_hook, accelerate.hooks.CpuOffload)


def fused_for_a_while(pipe: Any) -> None:
    """diffusers leaves the fused weights, and their flag, behind: what a LoRA then changes is not in them."""
    pipe.fuse_qkv_projections(vae=False)
    pipe.unfuse_qkv_projections(vae=False)
    for layer in all_layers(pipe):
        layer.attention.to_v.weight.data *= 3


def of_the_model(name: str, *args: Any, **options: Any) -> Put:
    def put(pipe: Any) -> None:
        if not hasattr(main_denoiser(pipe), name):
            pytest.skip(f"this version of diffusers has no {name}")
        getattr(main_denoiser(pipe), name)(*args, **options)

    return put


def quantised(pipe: Any) -> None:
    torchao = pytest.importorskip("torchao.quantization")  # `make test-apart`
    torchao.quantize_(pipe.transformer, torchao.Int8WeightOnlyConfig())


def backend(pipe: Any) -> Any:
    """It is set for the process as well; "_native_math" would let threads switch each other's kernels off."""
    of_the_model("set_attention_backend", "_native_math")(pipe)

    def take_out() -> None:
        pipe.transformer.set_attention_backend("native")
        pipe.transformer.reset_attention_backend()

    return take_out


def cache(name: str, **config: Any) -> Put:
    def put(pipe: Any) -> Any:
        if not hasattr(diffusers, name):
            pytest.skip(f"this version of diffusers has no {name}")
        if name.startswith("Pyramid"):
            config["current_timestep_callback"] = lambda: pipe._current_timestep
        of_the_model("enable_cache", getattr(diffusers, name)(**config))(pipe)
        return pipe.transformer.disable_cache

    return put


TO_IMAGE: dict[str, Any] = {"image": picture(), "strength": 0.75, "num_inference_steps": 8}
MASKED = {"image": picture(), "mask_image": picture(channels=1).round(), "height": 32, "width": 32}
SD2 = {"block_out_channels": (40, 80, 80), "attention_head_dim": (5, 10, 10), "use_linear_projection": True}
ODD = {"strength": 1.0}  # 17x9 is 9x5 on the next level: rounded up, as the convolutions do
BOXES = {"boxes": torch.rand(3, 2, 4), "masks": torch.ones(3, 2), "positive_embeddings": torch.rand(3, 2, 32)}
NETS: Any = {"controlnet": lambda: tiny.controlnet(tiny.unet())}
TWO_NETS: Any = {"controlnet": lambda: [tiny.controlnet(tiny.unet()) for _ in range(2)]}
ROWS = {
    "no guidance, three images": Row(drawn(sd15, guidance_scale=1.0, num_images_per_prompt=3)),
    "SD 2": Row(drawn(lambda folder: tiny.sd15(folder, scheduler=tiny.ddim(), **SD2))),
    "17x9": Row(kind("Img2Img", image=picture(34, 18), **ODD)),
    "image to image": Row(kind("Img2Img", **TO_IMAGE), calls=(2, 4)),
    "inpainting, nine channels": Row(kind("Inpaint", unet=lambda: tiny.unet(in_channels=9), **MASKED)),
    "pix2pix, a batch of three": Row(kind("InstructPix2Pix", unet=lambda: tiny.unet(in_channels=8), image=picture())),
    "SDXL": Row(drawn(tiny.sdxl)),
    "SDXL refiner": Row(drawn(refiner, **{**TO_IMAGE, "image": picture(64, 64), "strength": 0.5}), calls=(0, 4)),
    "upscaler": Row(drawn(upscaler, image=picture(16, 16))),
    "AnimateDiff": Row(drawn(animatediff, num_frames=3)),
    "ControlNet": Row(kind("ControlNet", **NETS, image=picture()), layers=4),
    "two ControlNets": Row(kind("ControlNet", **TWO_NETS, image=[picture()] * 2), layers=5),
    "T2I adapter": Row(kind("Adapter", adapter=tiny.t2i_adapter, image=picture())),
    "PEFT in a pipeline": Row(kind("", unet=lambda: get_peft_model(tiny.unet(), LoraConfig(target_modules=["to_q"])))),
    "unconditional": Row(unconditional),
    "pictures": Row(bare(picture_unet, 3, 3, 10, 26, text=0)),
    "one head": Row(bare(lambda: tiny.unet(attention_head_dim=1))),
    "upcast attention": Row(bare(lambda: tiny.unet(upcast_attention=True))),
    "GLIGEN": Row(bare(lambda: tiny.unet(attention_type="gated"), cross_attention_kwargs={"gligen": BOXES})),
    "video": Row(bare(video_unet, 1, 3, 8, 8, 8, text=1, added_time_ids=torch.ones(1, 3))),
    "DataParallel": Row(bare(lambda: torch.nn.DataParallel(tiny.unet()))),
    "DistributedDataParallel": Row(bare(lambda: torch.nn.parallel.DistributedDataParallel(tiny.unet()))),
    "AveragedModel": Row(bare(lambda: torch.optim.swa_utils.AveragedModel(tiny.unet()))),
    "LoRA": Row(drawn(sd15), lora, "image"),
    "fused LoRA": Row(drawn(sd15), lambda pipe: (lora(pipe), pipe.fuse_lora())[1], "image"),
    "IP-Adapter": Row(drawn(sd15), ip_adapter, "image", given={"ip_adapter_image": picture()}),
    "sequential offload": Row(drawn(sd15), sequential),
    "model offload": Row(drawn(sd15), whole),
    "channels last": Row(drawn(sd15), of_the_model("to", memory_format=torch.channels_last), "rounding"),
    "attention slicing": Row(drawn(sd15), methodcaller("enable_attention_slicing", 1), "rounding"),
    "processors of PyTorch 2": Row(drawn(sd15), of_the_model("set_attn_processor", AttnProcessor2_0()), "rounding"),
    "processors of PyTorch 1": Row(drawn(sd15), of_the_model("set_attn_processor", AttnProcessor()), "rounding"),
    "fused projections": Row(drawn(sd15), of_the_model("fuse_qkv_projections"), "rounding", few=THREE_PHASES),
    "projections fused for a while": Row(drawn(sd15), fused_for_a_while, "image"),
}

GROUPS = {"offload_type": "block_level", "num_blocks_per_group": 1}
FLOAT8 = {"storage_dtype": torch.float8_e4m3fn, "compute_dtype": torch.float32}
PYRAMID = {"spatial_attention_block_skip_range": 2, "spatial_attention_timestep_skip_range": (-1, 2000)}
BLOCKS = {"spatial_attention_block_identifiers": ("transformer_blocks",)}
MAG = {"mag_ratios": [1.0] * STEPS, "num_inference_steps": STEPS, "max_skip_steps": 1}
WEIGHTS: dict[str, tuple[Put, Any]] = {
    "LoRA": (lora, "image"),
    "fused projections": (of_the_model("fuse_qkv_projections"), "rounding"),
    "casting": (of_the_model("enable_layerwise_casting", **FLOAT8), "image"),
    "quantised": (quantised, "image"),
    "blocks offloaded": (of_the_model("enable_group_offload", CPU, CPU, **GROUPS), "nothing"),
}
OF_FLUX: dict[str, tuple[Put, Any]] = {
    "fused LoRA": (lambda pipe: (lora(pipe), pipe.fuse_lora())[1], "image"),
    "leaves offloaded": (of_the_model("enable_group_offload", CPU, CPU, offload_type="leaf_level"), "nothing"),
    "backend": (backend, "rounding"),
}
CACHES = {
    "first block cache": cache("FirstBlockCacheConfig", threshold=10.0),
    "mag cache": cache("MagCacheConfig", **MAG),
    "taylorseer": cache("TaylorSeerCacheConfig", cache_interval=2, disable_cache_before_step=2, max_order=1),
    "pyramid": cache("PyramidAttentionBroadcastConfig", **PYRAMID, **BLOCKS),
}
NEGATIVE = {"negative_prompt_embeds": tiny_transformers.embeds(1, width=tiny_transformers.TEXT_WIDTH)}
NEGATIVE |= {"negative_pooled_prompt_embeds": torch.ones(1, 32)}


def of(family: str, **options: Any) -> Make:
    """Flux with two blocks of each kind, so that caches find some to spare."""
    if family == "Flux.1":
        options["config"] = {"num_layers": 2, "num_single_layers": 2}
    return lambda folder: tiny_transformers.made(family, num_inference_steps=STEPS, **options)


for family, layers, calls, features, caches in (
    ("Flux.1", 4, (3, 3), {**WEIGHTS, **OF_FLUX}, list(CACHES)),
    ("Qwen-Image", 2, (6, 6), WEIGHTS, ["first block cache", "mag cache"]),  # two calls in a step
    ("Wan", 2, (6, 6), WEIGHTS, ["first block cache", "mag cache"]),
):
    own = {"layers": layers, "calls": calls, "few": FEW}
    ROWS |= {f"{family}, {name}": Row(of(family), *feature, **own) for name, feature in features.items()}
    ROWS |= {f"{family}, {name}": Row(of(family), CACHES[name], "image", **own, spares=True) for name in caches}
GUIDED = of("Flux.1", true_cfg_scale=2.0, **NEGATIVE)
ROWS["Flux.1, two calls"] = Row(GUIDED, CACHES["first block cache"], "image", 4, (6, 6), few=FEW, spares=True)
# of 3 and 3.5 large: diffusers itself cannot call a second attention with those
SD3 = of("Stable Diffusion 3", config={"dual_attention_layers": ()})
ROWS["Stable Diffusion 3, fused projections"] = Row(SD3, *WEIGHTS["fused projections"], 2, (3, 3), few=FEW)


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def classes(pipe: Any) -> dict[str, type]:
    return {place: type(each) for place, each in processors(pipe).items()}


@pytest.mark.parametrize("name", ROWS)
def test_whoever_comes_first(folder: Path, name: str) -> None:
    row, few, removed = ROWS[name], None, None
    pipe, run = row.make(folder)
    if row.put is not None:
        before, untouched = classes(pipe), run()
        elfatt_sd.apply_patch(pipe, row.few)
        without = run()
        take_out = row.put(pipe)
        few = run(**row.given)
        if row.changes == "nothing":
            assert torch.equal(few, without)
        else:
            assert torch.allclose(few, without, atol=1e-3) == (row.changes == "rounding")
        if take_out is not None:
            take_out()
            assert torch.equal(run(), without)
            row.put(pipe)
        elfatt_sd.remove_patch(pipe)
        removed = run(**row.given)
        if take_out is not None:
            take_out()
            assert classes(pipe) == before
            assert torch.equal(run(), untouched)
        pipe, run = row.make(folder)
        take_out = row.put(pipe)

    found, expected = processors(pipe), run(**row.given)
    assert removed is None or torch.equal(removed, expected)
    for config in (ALL, SHARED) if row.spares else (ALL,):
        elfatt_sd.apply_patch(pipe, config)
        with recorded() as calls:
            torch.testing.assert_close(run(**row.given), expected, atol=1e-4, rtol=1e-3)
        if row.spares:
            assert 0 < sum(calls.values()) < row.layers * sum(row.calls)
        else:
            assert calls == {
                (id(layer.attention), kind): count
                for layer in all_layers(pipe)
                for kind, count in zip((FIRST, SECOND), row.calls, strict=True)
                if count
            }
    elfatt_sd.apply_patch(pipe, row.few)
    with recorded() as calls:
        image = run(**row.given)
    assert image.isfinite().all() and image.shape == expected.shape and not torch.equal(image, expected)
    assert len({layer for layer, _ in calls}) == row.layers
    assert few is None or torch.equal(image, few)
    elfatt_sd.remove_patch(pipe)
    assert all(each is found[place] for place, each in processors(pipe).items())
    assert torch.equal(run(**row.given), expected)
    if row.put is backend:
        take_out()


def test_a_module_with_the_parts_of_a_pipeline() -> None:
    """What a trainer is given: several models, by the names that pipelines have for them, or by others."""
    unet, module, other = tiny.unet(), torch.nn.Module(), torch.nn.Module()
    module.unet, module.controlnet, module.vae = unet, tiny.controlnet(unet), tiny.vae()
    elfatt_sd.apply_patch(module, "tome")
    assert elfatt_sd.is_patched(unet) and elfatt_sd.is_patched(module.controlnet)
    elfatt_sd.remove_patch(module)
    assert not elfatt_sd.is_patched(module)
    other.student, other.teacher, other.vae = unet, tiny.unet(), tiny.vae()
    with pytest.raises(ElfattError, match="not supported: Module cannot be patched"):
        elfatt_sd.apply_patch(other, "tome")


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.spares])
@pytest.mark.filterwarnings("ignore:.*approximates no step of this run", "ignore:.*are on no schedule")
def test_steps_take_over_from_earlier_ones(folder: Path, name: str) -> None:
    """In two runs alike, and whoever comes first; nothing is left."""
    row, found = ROWS[name], []
    for before in (True, False) if row.put else (True,):
        pipe, run = row.make(folder)
        if before and row.put:
            row.put(pipe)
        untouched, denoiser = run(**row.given if before else {}), main_denoiser(pipe)
        cut = [*family_of(denoiser).cuts(unwrap(denoiser)), "output"][0]
        elfatt_sd.apply_patch(pipe, "sd", reuse=(elfatt_sd.StepReuse(cut=cut, first=1, last=0, order=0),))
        if not before and row.put:
            row.put(pipe)
        found += [run(**row.given), run(**row.given)]
        elfatt_sd.remove_patch(pipe)
        removed = run(**row.given)
        assert before is False or torch.equal(removed, untouched)
    assert all(torch.equal(each, found[0]) for each in found)
    assert torch.isfinite(found[0]).all()
    assert torch.equal(found[0], removed) == (max(row.calls) < 2 or name in ("T2I adapter",))
