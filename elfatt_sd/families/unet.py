"""UNets and their ControlNets: self-attention inside convolutional levels, each on a grid of its own."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

from diffusers.models.attention_processor import Attention
from torch import nn

from elfatt_sd.families.base import Family, Fill, Given, SelfAttention, some_timestep
from elfatt_sd.families.cuts import DeepFeatures, Down, LastUp, Part
from elfatt_sd.methods import Grid

SCALE = 8  # pixels of their images to one of the latent, on each side
_TEXT_TOKENS, _TIME_IDS = 77, 6
# Attention over frames, and over tokens of the image together with others (GLIGEN's boxes).
_OTHER_TOKENS = ("motion_modules", "temp_attentions", "temporal_transformer_blocks", "transformer_in", ".fuser.")


class UNet(Family):
    """`UNet2DConditionModel` and its like, and ControlNets."""

    part = "unet"
    title = "UNet"
    merges = True
    what = "a UNet whose layers are known (conv_in, down_blocks, mid_block)"

    def matches(self, module: object) -> bool:
        return isinstance(module, nn.Module) and all(
            hasattr(module, name) for name in ("conv_in", "down_blocks", "mid_block")
        )

    def layers(self, module: nn.Module) -> list[SelfAttention]:
        levels = dict(_block_levels(module))
        modules = dict(module.named_modules())
        layers = []
        for name, attention in modules.items():
            block = next((prefix for prefix in levels if name.startswith(prefix + ".")), None)
            if block is None or any(part in name for part in _OTHER_TOKENS):
                continue
            if isinstance(attention, Attention) and not attention.is_cross_attention:
                transformer, _, rest = name.partition(".transformer_blocks.")
                parent, _, own = name.rpartition(".")
                norm = f"{parent}.{own.replace('attn', 'norm')}" if own in ("attn1", "attn2") else ""
                layers.append(
                    SelfAttention(
                        name,
                        attention,
                        modules.get(norm) if norm else None,
                        2 ** len(levels[block]),
                        rest.startswith("0.") and isinstance(modules.get(f"{transformer}.proj_in"), nn.Conv2d),
                        levels[block],
                    )
                )
        return layers

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        sample = args[0] if args else kwargs["sample"]
        timestep = args[1] if len(args) > 1 else kwargs["timestep"]
        adapted = kwargs.get("down_intrablock_additional_residuals") is not None
        given = replace(Given.latent(sample, timestep), whole=adapted)
        image = cast("int", module.config.in_channels) * given.grid.tokens  # type: ignore[union-attr]
        return replace(given, frames=sample[0].numel() // image) if sample.ndim == 5 else given

    def cuts(self, module: Any) -> list[str]:
        """Return where it may be cut: `shallow-N` runs the last N layers, and the first N - 1, in every step."""
        last: Any = getattr(module, "up_blocks", [None])[-1]
        layers = [*getattr(last, "resnets", ())]
        stacks = [part for name, part in getattr(last, "_modules", {}).items() if name != "upsamplers"]
        alike = all(isinstance(stack, nn.ModuleList) and len(stack) == len(layers) for stack in stacks)
        if not alike or any(getattr(each, "in_channels", 1) <= getattr(each, "out_channels", 0) for each in layers):
            return []  # some join no layer on the way down, or have several attentions
        return [f"shallow-{number}" for number in range(1, len(layers))]

    def _stacks(self, module: nn.Module) -> dict[str, list[nn.Module]]:
        return {}  # its blocks do not follow each other alone

    def cut(self, module: Any, name: str) -> list[Part]:
        if name not in self.cuts(module):
            return super().cut(module, name)
        layers, last = int(name.rpartition("-")[2]), module.up_blocks[-1]
        first, *others = module.down_blocks
        border = len(last.resnets) - layers
        return [
            *(Down(first, layers - 1), *(Down(block, 0) for block in others)),
            *(Part(block) for block in (module.mid_block, *module.up_blocks[:-1]) if block is not None),
            LastUp(last, layers),
            DeepFeatures(last.resnets[border], last.resnets[border - 1]),
        ]

    def arguments(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        config: Any = module.config
        names = inspect.signature(module.forward).parameters
        if "added_time_ids" in names:  # Stable Video Diffusion: frames before channels
            sample = fill(batch, 1, config.in_channels, grid.rows, grid.columns)
        else:
            frames = [1] * hasattr(module, "transformer_in") or [1] * ("motion_num_attention_heads" in config)
            sample = fill(batch, config.in_channels, *frames, grid.rows, grid.columns)
        arguments: dict[str, Any] = {"sample": sample, "timestep": some_timestep(sample.device)}
        if "encoder_hidden_states" in names:
            width = config.get("encoder_hid_dim") or config.cross_attention_dim
            width = max(width) if isinstance(width, list | tuple) else width
            arguments["encoder_hidden_states"] = fill(batch, _TEXT_TOKENS, width)
        if "added_time_ids" in names:
            arguments["added_time_ids"] = fill(batch, 3)
        if "controlnet_cond" in names:
            pixels = 2 ** (len(config.conditioning_embedding_out_channels) - 1)
            channels = config.get("conditioning_channels", 3)
            arguments["controlnet_cond"] = fill(batch, channels, grid.rows * pixels, grid.columns * pixels)
        if getattr(module, "class_embedding", None) is not None:
            kind = config.get("class_embed_type")
            wide = kind in ("projection", "simple_projection")
            width = config.projection_class_embeddings_input_dim if wide else 4 * config.block_out_channels[0]
            arguments["class_labels"] = fill(batch, width) if wide or kind == "identity" else fill(batch).long()
        if config.get("addition_embed_type") == "text_time":
            pooled = config.projection_class_embeddings_input_dim - _TIME_IDS * config.addition_time_embed_dim
            sides = (grid.rows * SCALE, grid.columns * SCALE)
            sizes = sample.new_tensor([[*sides, 0, 0, *sides]]).expand(batch, -1)
            arguments["added_cond_kwargs"] = {"text_embeds": fill(batch, pooled), "time_ids": sizes}
        return arguments


def _block_levels(denoiser: Any) -> Iterator[tuple[str, tuple[bool, ...]]]:
    """Yield the blocks, and for each halving of the grid on the way down to it, whether odd sides are rounded up."""
    rounding: tuple[bool, ...] = ()
    down = []
    for index, block in enumerate(denoiser.down_blocks):
        down.append(rounding)
        yield f"down_blocks.{index}", rounding
        if getattr(block, "downsamplers", None):
            convolutions = [module for module in block.downsamplers[0].modules() if isinstance(module, nn.Conv2d)]
            rounding = (*rounding, any(each.stride == (2, 2) and each.padding == (1, 1) for each in convolutions))
    yield "mid_block", rounding
    for index, rounding in enumerate(reversed(down[: len(getattr(denoiser, "up_blocks", ()))])):
        yield f"up_blocks.{index}", rounding
