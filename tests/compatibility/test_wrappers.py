"""UNets in wrappers of data-parallel training and PEFT, and what is no UNet whose layers are known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from support import tiny_pipelines as tiny
from support.checks import recorded, runner

import elfatt_sd
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import unwrap


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
