"""Find the self-attention layers of a pipeline: which there are, and on which grid they work."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from diffusers.models import attention_processor
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
        transformer: the module around it that is given the grid as `[batch, channels, rows, columns]`; None where the
            layer itself is.
        rounding: of each halving of the grid on the way down to it, whether odd sides are rounded up.
    """

    name: str
    attention: Attention
    norm: nn.Module | None
    downsample: int
    channels_first: bool = False
    transformer: nn.Module | None = None
    rounding: tuple[bool, ...] = ()

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the layer's grid for a latent of `height x width`."""
        halvings = self.downsample.bit_length() - 1
        for up in (*self.rounding, *[True] * halvings)[:halvings]:
            height, width = (height + up) // 2, (width + up) // 2
        return height, width

    @property
    def processor(self) -> Any:
        """Its own attention processor, also while it is patched."""
        return self.attention.get_processor()

    @property
    def processor_name(self) -> str:
        """Class of its own attention processor."""
        return type(self.processor).__name__

    @property
    def obstacle(self) -> str:
        """Why its processor is left alone; empty if it is plain attention, which a method may take the place of."""
        return (
            ""
            if is_plain(self.processor)
            else f"its processor, {self.processor_name}, is not known to be plain attention"
        )


# Processors that compute softmax attention of a layer's own projections, and nothing else.
_PLAIN = (
    "AttnProcessor",
    "AttnProcessor2_0",
    "AttnProcessorNPU",
    "FusedAttnProcessor2_0",
    "LoRAAttnProcessor",
    "LoRAAttnProcessor2_0",
    "LoRAXFormersAttnProcessor",
    "SlicedAttnProcessor",
    "XFormersAttnProcessor",
    "XLAFlashAttnProcessor2_0",
)


def is_plain(processor: object) -> bool:
    """Tell whether an attention processor is one of diffusers' own for plain softmax attention."""
    kind = type(processor)
    return kind.__name__ in _PLAIN and getattr(attention_processor, kind.__name__, None) is kind


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside the wrappers of `torch.compile`, of PEFT, and of data-parallel training."""
    while True:
        if hasattr(module, "_orig_mod"):
            module = module._orig_mod  # type: ignore[assignment]
        elif isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            module = module.module
        elif hasattr(module, "get_base_model") and hasattr(module, "peft_config"):
            module = module.get_base_model()  # type: ignore[operator]
        else:
            return module


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
    unet = getattr(target, "unet", target if isinstance(target, nn.Module) else None)
    if isinstance(unet, nn.Module) and not is_denoiser(unet):
        raise ElfattError(
            f"{type(unwrap(unet)).__name__} is not a UNet whose layers are known (conv_in, down_blocks, mid_block); "
            "give a diffusers pipeline with a UNet2DConditionModel or its like, or such a UNet."
        )
    if unet is None or not isinstance(unet, nn.Module):
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
    """Return the self-attention layers over image tokens, in the order of the modules."""
    denoiser = unwrap(denoiser)
    levels = dict(_block_levels(denoiser))
    modules = dict(denoiser.named_modules())
    layers = []
    for name, module in modules.items():
        block = next((prefix for prefix in levels if name.startswith(prefix + ".")), None)
        if block is None or any(part in name for part in _OTHER_TOKENS):
            continue
        if isinstance(module, Attention) and not module.is_cross_attention:
            rounding = levels[block]
            layers.append(
                SelfAttention(
                    name,
                    module,
                    _norm_before(name, modules),
                    2 ** len(rounding),
                    _follows_convolution(name, modules),
                    modules.get(name.partition(".transformer_blocks.")[0]) if ".transformer_blocks." in name else None,
                    rounding,
                )
            )
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


def _block_levels(denoiser: nn.Module) -> Iterator[tuple[str, tuple[bool, ...]]]:
    """Yield the blocks, each with the halvings of the grid above it; see `SelfAttention.rounding`.

    The blocks on the way up mirror those on the way down, whose outputs they are joined with.
    """
    rounding: tuple[bool, ...] = ()
    down = []
    for index, block in enumerate(denoiser.down_blocks):  # type: ignore[arg-type]
        down.append(rounding)
        yield f"down_blocks.{index}", rounding
        downsamplers = getattr(block, "downsamplers", None)
        if downsamplers:
            rounding = (*rounding, _rounds_up(downsamplers[0]))
    yield "mid_block", rounding
    for index, rounding in enumerate(reversed(down[: len(getattr(denoiser, "up_blocks", ()))])):
        yield f"up_blocks.{index}", rounding


def _rounds_up(downsampler: nn.Module) -> bool:
    """Tell whether a downsampler makes 5 rows of 9, and not 4.

    That is what a convolution does which is padded on all sides; pooling, filters, and padding on one side round down.
    """
    convolutions = (module for module in downsampler.modules() if isinstance(module, nn.Conv2d))
    return any(module.stride == (2, 2) and module.padding == (1, 1) for module in convolutions)


def _norm_before(name: str, modules: dict[str, nn.Module]) -> nn.Module | None:
    parent, _, own = name.rpartition(".")
    return modules.get(f"{parent}.{own.replace('attn', 'norm')}") if own in ("attn1", "attn2") else None


def _follows_convolution(name: str, modules: dict[str, nn.Module]) -> bool:
    """Tell whether a layer's block is the first after a transformer's convolution."""
    transformer, _, rest = name.partition(".transformer_blocks.")
    return rest.startswith("0.") and isinstance(modules.get(f"{transformer}.proj_in"), nn.Conv2d)
