"""Denoisers of known shapes without weights, what a call of one takes and costs, and the sizes that it can draw."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from elfatt_sd.errors import ElfattError
from elfatt_sd.families import family_of, unwrap
from elfatt_sd.families.cuts import Stand, Taking
from elfatt_sd.families.unet import SCALE
from elfatt_sd.methods import Grid

Config = Mapping[str, Any]
_SMALL = 0.5  # fraction of the model's own side below which images are of little use


@dataclass(frozen=True)
class Shape:
    """The shape of a denoiser, to time with random weights."""

    kind: str  # name of its class in diffusers
    config: Config  # what differs from that class's own
    # the same, for a transformer with a few of its blocks, which can be timed where the whole one does not fit
    few: Config
    channels: int = 16  # of the latent
    scale: int = SCALE  # pixels to one of the latent, on each side
    frames: int = 4  # of a video, past the first one, to one of the latent


_SD15 = {
    "sample_size": 64,
    "block_out_channels": (320, 640, 1280, 1280),
    "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
    "attention_head_dim": 8,
    "cross_attention_dim": 768,
}
_SDXL = {
    "sample_size": 128,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
    "use_linear_projection": True,
}
_SD35_MEDIUM = {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "qk_norm": "rms_norm"}
_SD35_MEDIUM |= {"pos_embed_max_size": 384, "dual_attention_layers": tuple(range(13))}
_WAN_SMALL = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
_COGVIDEOX_5B = {"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True}
_FEW = {"num_layers": 2}
_ONE_EACH = {"num_layers": 1, "num_single_layers": 1}
_ONE_AND_TWO = {"num_layers": 1, "num_single_layers": 2}
SHAPES: dict[str, Shape] = {
    "sd15": Shape("UNet2DConditionModel", _SD15, {}, channels=4, frames=1),
    "sdxl": Shape("UNet2DConditionModel", _SDXL, {}, channels=4, frames=1),
    "pixart": Shape("PixArtTransformer2DModel", {"caption_channels": 4096}, _FEW, channels=4),
    "sd3.5-medium": Shape("SD3Transformer2DModel", _SD35_MEDIUM, {**_FEW, "dual_attention_layers": (0,)}),
    "flux": Shape("FluxTransformer2DModel", {"guidance_embeds": True}, _ONE_AND_TWO),
    "chroma": Shape("ChromaTransformer2DModel", {}, _ONE_AND_TWO),
    "flux.2": Shape("Flux2Transformer2DModel", {}, _ONE_AND_TWO, channels=32),
    "qwen-image": Shape("QwenImageTransformer2DModel", {}, _FEW),
    "z-image": Shape("ZImageTransformer2DModel", {}, {"n_layers": 2, "n_refiner_layers": 1}),
    "wan-1.3b": Shape("WanTransformer3DModel", _WAN_SMALL, _FEW),
    "wan-14b": Shape("WanTransformer3DModel", {}, _FEW),
    "ltx-video": Shape("LTXVideoTransformer3DModel", {}, _FEW, channels=128, scale=32, frames=8),
    "hunyuan-video": Shape("HunyuanVideoTransformer3DModel", {}, {**_ONE_EACH, "num_refiner_layers": 1}),
    "hunyuan-video-1.5": Shape(
        "HunyuanVideo15Transformer3DModel", {}, {**_FEW, "num_refiner_layers": 1}, channels=32, scale=16
    ),
    "cogvideox-5b": Shape("CogVideoXTransformer3DModel", _COGVIDEOX_5B, _FEW),
}
UNET_NAMES, SHAPE_NAMES = ("sd15", "sdxl"), tuple(SHAPES)


def sketch(name: str) -> SimpleNamespace:
    """Return what a plan needs of a pipeline: a known shape without weights, of which nothing is allocated."""
    shape, part = SHAPES[name], "unet" if name in UNET_NAMES else "transformer"
    scales = {"vae_scale_factor": shape.scale, "vae_scale_factor_temporal": shape.frames}
    return SimpleNamespace(**{part: empty_model(shape)}, **scales)


def empty_model(shape: Shape, *, few: bool = False) -> nn.Module:
    """Build a denoiser on the meta device, with a few of its blocks or all of them."""
    import diffusers

    make: Any = getattr(diffusers, shape.kind, None)
    if make is None:
        raise ElfattError(
            f"the installed diffusers {diffusers.__version__} has no {shape.kind}; pip install -U diffusers."
        )
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # diffusers' own, of how it builds the model
        model: nn.Module = make(**{**shape.config, **(shape.few if few else {})})
    return model


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts as `FlopCounterMode` does, in half of its time: not by module."""

    flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += int(count(*args, **(kwargs or {}), out_val=out))
        return out


@dataclass(frozen=True)
class Blueprint:
    """A denoiser's class and configuration: as much of it as its call's multiply-adds depend on, without weights."""

    kind: type
    config: str

    @classmethod
    def of(cls, denoiser: nn.Module) -> Blueprint:
        module: Any = unwrap(denoiser)
        return cls(type(module), json.dumps(dict(getattr(module, "config", {})), default=list, sort_keys=True))

    @functools.cache  # noqa: B019 - a blueprint is small, and there are few
    def taking_over(self, grid: Grid, cut: str) -> tuple[int, int] | None:
        """Return the multiply-adds of a call that takes over what lies within a cut, and the values that it takes.

        Of one image, without a cut of an untouched call; None where it cannot be run without weights.
        """
        takings, counter = [Taking()], _Counter()  # type: ignore[no-untyped-call]
        try:
            with warnings.catch_warnings(), torch.device("meta"), torch.no_grad(), counter:
                warnings.simplefilter("ignore")  # of building such a model once more
                module: Any = self.kind.from_config(json.loads(self.config)).eval()  # type: ignore[attr-defined]
                given = (family := family_of(module)).arguments(module, grid, 1, torch.empty)
                for part in family.cut(module, cut) if cut else ():
                    Stand(part, lambda: takings[-1])
                module(**given)
                whole = counter.flops if cut else 0
                if cut:
                    takings.append(Taking(takings[0].kept))
                    module(**given)
        except Exception:  # of a class that takes other arguments, or reads values: whatever its authors raise
            return None
        flops = counter.flops - whole
        return (flops // 2, sum(each.numel() for each in takings[0].kept.values())) if flops or cut else None

    def multiply_adds(self, grid: Grid) -> int | None:
        known = self.taking_over(grid, "")
        return None if known is None else known[0]


@torch.no_grad()
def fingerprint(denoiser: nn.Module) -> str:
    """Return a hash of a denoiser that is the same on all devices and in all dtypes; empty where weights are not there.

    It is of its class, of what its configuration changes of the class's own, and of the weights' names, shapes, and the
    signs of eight values of each, of which other training changes some; of LoRAs also of their scales.
    """
    module: Any = unwrap(denoiser)
    own, plain = inspect.signature(type(module).__init__).parameters, functools.partial(json.dumps, default=str)
    config = {name: plain(value) for name, value in sorted(module.config.items()) if name in own}
    changed = {name: value for name, value in config.items() if value != plain(own[name].default)}
    digest = hashlib.sha256(f"{type(module).__name__}{changed}".encode())
    for name, weight in module.named_parameters():
        if weight.device.type == "meta":
            return ""
        some = weight.detach().flatten()[:: max(1, weight.numel() // 8)][:8]
        name = re.sub(r"(\.lora_\w+)\.[^.]+", r"\1", name)  # without what somebody has called it
        digest.update(f"{name}{tuple(weight.shape)}{torch.signbit(some.float()).tolist()}".encode())
    loras = [part for part in module.modules() if isinstance(getattr(part, "scaling", None), dict)]
    scales = [part.scaling.get(name) for part in loras for name in part.active_adapters]
    digest.update(str(scales or "").encode())
    return digest.hexdigest()[:20]


@dataclass(frozen=True)
class Dimensions:
    """What the size of an image depends on."""

    own: tuple[int, int]  # height and width that the model was trained for, in pixels
    factor: int  # pixels to one of the latent, on each side
    least: int  # pixels of the smallest side that the denoiser can take
    multiple: int  # pixels that every side is a multiple of

    @classmethod
    def of(cls, module: nn.Module, factor: int, own: tuple[int, int] | None = None) -> Dimensions:
        """Read them off a denoiser, for a number of pixels to one of its latent."""
        family, config = family_of(module), cast("Config", module.config)
        latent, patch = family.latent(module), family.patch_of(module)[-1]
        levels = len(config.get("block_out_channels") or (0,))  # each but the first halves the latent
        rows, columns = config.get("sample_height", latent.rows), config.get("sample_width", latent.columns)
        own = own or (rows * factor, columns * factor)
        return cls(own, factor, factor * max(patch, 2 ** (levels - 1)), factor * patch)

    def size(self, height: int | None, width: int | None) -> tuple[int, int]:
        return self.own[0] if height is None else height, self.own[1] if width is None else width

    def check(self, height: int | None, width: int | None) -> None:
        """Refuse a side that the denoiser cannot take: one that its levels cannot halve, or its patches cannot tile."""
        for name, pixels in (("height", height), ("width", width)):
            if pixels is not None and pixels < self.least:
                raise ElfattError(
                    f"{name}={pixels} is not accepted; this model needs at least {self.least}, and is made for "
                    f"{self.own[1]}x{self.own[0]}."
                )
            if pixels is not None and pixels % self.multiple:
                raise ElfattError(f"{name}={pixels} is not accepted; this model needs a multiple of {self.multiple}.")

    def small(self, height: int | None, width: int | None) -> str:
        size = self.size(height, width)
        if all(side >= _SMALL * own for side, own in zip(size, self.own, strict=True)):
            return ""
        return f"the model is made for images of {self.own[1]}x{self.own[0]}; expect poor ones at {size[1]}x{size[0]}."
