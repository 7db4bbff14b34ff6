"""Find the self-attention layers of a pipeline: which there are, and on which grid they work."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from diffusers.models.attention_processor import Attention
from torch import nn

from elfatt_sd.config import ElfattError, PatchConfig

Module = TypeVar("Module", bound=nn.Module)
# Attention over frames, and over tokens of the picture together with others (GLIGEN's boxes).
_OTHER_TOKENS = ("motion_modules", "temp_attentions", "temporal_transformer_blocks", "transformer_in", ".fuser.")


@dataclass(frozen=True)
class SelfAttention:
    """A self-attention layer over the tokens of a picture.

    Attributes:
        name: its path in the denoiser, `down_blocks.0.attentions.0.transformer_blocks.0.attn1`.
        attention: the module.
        norm: the normalisation before it, whose input is the block's input; None where the layer normalises itself.
        downsample: how many times smaller than the latent its grid is, on each side.
        channels_first: whether the block's input lies channels first in memory, as a convolution left it.
    """

    name: str
    attention: Attention
    norm: nn.Module | None
    downsample: int
    channels_first: bool = False

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the layer's grid for a latent of `height x width`; odd sizes are rounded up at every level."""
        factor = self.downsample
        while factor > 1:
            height, width, factor = -(-height // 2), -(-width // 2), factor // 2
        return height, width


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside a `torch.compile` wrapper."""
    return getattr(module, "_orig_mod", module)


def copy_structure(module: Module) -> Module:
    """Copy a module without its weights: both have the same parameters and buffers."""
    shared = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(tensor): tensor for tensor in shared})


def is_denoiser(module: object) -> bool:
    """Tell whether a module has the parts of a diffusers UNet or ControlNet."""
    return isinstance(module, nn.Module) and all(
        hasattr(unwrap(module), name) for name in ("conv_in", "down_blocks", "mid_block")
    )


def find_denoisers(target: Any) -> dict[str, nn.Module]:
    """Return the UNet of a pipeline and its ControlNets, by name.

    Args:
        target: a diffusers pipeline, or a bare UNet.

    Raises:
        ElfattError: there is no UNet.
    """
    if is_denoiser(target):
        return {"unet": target}
    unet = getattr(target, "unet", None)
    if not is_denoiser(unet):
        parts = ", ".join(getattr(target, "components", {})) or "none"
        raise ElfattError(
            f"{type(target).__name__} has no UNet (its parts: {parts}); "
            "give a diffusers pipeline with a UNet, or a UNet."
        )
    controlnet = getattr(target, "controlnet", None)
    nets = list(controlnet) if isinstance(controlnet, list | tuple) else list(getattr(controlnet, "nets", [controlnet]))
    nets = list({id(unwrap(net)): net for net in nets if is_denoiser(net)}.values())  # one may take several pictures
    names = [f"controlnet.{index}" for index in range(len(nets))] if len(nets) > 1 else ["controlnet"]
    return {"unet": unet, **dict(zip(names, nets, strict=False))}


def find_layers(denoiser: nn.Module) -> list[SelfAttention]:
    """Return the self-attention layers over picture tokens, in the order of the modules."""
    denoiser = unwrap(denoiser)
    factors = dict(_block_factors(denoiser))
    modules = dict(denoiser.named_modules())
    layers = []
    for name, module in modules.items():
        block = next((prefix for prefix in factors if name.startswith(prefix + ".")), None)
        if block is None or any(part in name for part in _OTHER_TOKENS):
            continue
        if isinstance(module, Attention) and not module.is_cross_attention:
            norm, channels_first = _norm_before(name, modules), _follows_convolution(name, modules)
            layers.append(SelfAttention(name, module, norm, factors[block], channels_first))
    return layers


def levels_of(layers: Iterable[SelfAttention]) -> list[int]:
    """Return the downsampling factors at which there are layers, rising."""
    return sorted({layer.downsample for layer in layers})


def select_layers(layers: list[SelfAttention], config: PatchConfig, levels: Sequence[int]) -> list[SelfAttention]:
    """Return the layers that a configuration patches.

    Args:
        layers: of one denoiser.
        config: its `levels` or `max_downsample` decide.
        levels: of the pipeline's UNet, as `levels_of` gives them.
    """
    limit: int | None = config.max_downsample
    if limit is None:
        limit = levels[: config.levels][-1] if levels else 0
    return [layer for layer in layers if layer.downsample <= limit]


def _block_factors(denoiser: nn.Module) -> Iterator[tuple[str, int]]:
    factor = 1
    for index, block in enumerate(denoiser.down_blocks):  # type: ignore[arg-type]
        yield f"down_blocks.{index}", factor
        factor *= 2 if getattr(block, "downsamplers", None) else 1
    yield "mid_block", factor
    for index, block in enumerate(getattr(denoiser, "up_blocks", ())):
        yield f"up_blocks.{index}", factor
        factor //= 2 if getattr(block, "upsamplers", None) else 1


def _norm_before(name: str, modules: dict[str, nn.Module]) -> nn.Module | None:
    parent, _, own = name.rpartition(".")
    return modules.get(f"{parent}.{own.replace('attn', 'norm')}") if own in ("attn1", "attn2") else None


def _follows_convolution(name: str, modules: dict[str, nn.Module]) -> bool:
    """Tell whether a layer's block is the first after a transformer's convolution."""
    transformer, _, rest = name.partition(".transformer_blocks.")
    return rest.startswith("0.") and isinstance(modules.get(f"{transformer}.proj_in"), nn.Conv2d)
