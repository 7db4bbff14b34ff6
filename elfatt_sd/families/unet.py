"""UNets and their ControlNets: self-attention inside convolutional levels, each on a grid of its own."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

from diffusers.models.attention_processor import Attention
from torch import Tensor, nn

from elfatt_sd.families.base import Fill, Given, SelfAttention, latent_size, some_timestep
from elfatt_sd.methods import Grid

SCALE = 8  # pixels of their images to one of the latent, on each side
_TEXT_TOKENS, _TIME_IDS = 77, 6
# Attention over frames, and over tokens of the image together with others (GLIGEN's boxes).
_OTHER_TOKENS = ("motion_modules", "temp_attentions", "temporal_transformer_blocks", "transformer_in", ".fuser.")


class UNet:
    """`UNet2DConditionModel` and its like, and ControlNets; see `families.base.Family`."""

    part = "unet"
    title = "UNet"
    joint = False
    merges = True
    text = 0
    what = "a UNet whose layers are known (conv_in, down_blocks, mid_block)"

    def matches(self, module: object) -> bool:
        return isinstance(module, nn.Module) and all(
            hasattr(module, name) for name in ("conv_in", "down_blocks", "mid_block")
        )

    def layers(self, module: nn.Module) -> list[SelfAttention]:
        """Return the self-attention layers over image tokens."""
        levels = dict(_block_levels(module))
        modules = dict(module.named_modules())
        layers = []
        for name, attention in modules.items():
            block = next((prefix for prefix in levels if name.startswith(prefix + ".")), None)
            if block is None or any(part in name for part in _OTHER_TOKENS):
                continue
            if isinstance(attention, Attention) and not attention.is_cross_attention:
                rounding = levels[block]
                layers.append(
                    SelfAttention(
                        name,
                        attention,
                        _norm_before(name, modules),
                        2 ** len(rounding),
                        _follows_convolution(name, modules),
                        modules.get(name.partition(".transformer_blocks.")[0])
                        if ".transformer_blocks." in name
                        else None,
                        rounding,
                    )
                )
        return layers

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        sample = args[0] if args else kwargs["sample"]
        timestep = args[1] if len(args) > 1 else kwargs["timestep"]
        given = Given.latent(sample, timestep)
        image = cast("int", module.config.in_channels) * given.grid.tokens  # type: ignore[union-attr]
        return replace(given, frames=sample[0].numel() // image) if sample.ndim == 5 else given

    def latent(self, module: nn.Module) -> Grid:
        return latent_size(module)

    def grid(self, module: nn.Module, latent: Grid) -> Grid:
        """Its input is the latent."""
        return latent

    def entrances(self, module: nn.Module) -> tuple[tuple[str, nn.Module], ...]:
        """The timestep is embedded before the first convolution; where it is not known how, only that is returned."""
        stem = ("sample", module.conv_in)
        return (("timestep", module.time_proj), stem) if hasattr(module, "time_proj") else (stem,)  # type: ignore[return-value]

    def takes_noise_levels(self, module: nn.Module) -> bool:
        return getattr(getattr(module, "config", None), "time_embedding_type", None) == "fourier"

    def arguments(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        return _arguments(module, grid.rows, grid.columns, batch, fill)


def _block_levels(denoiser: nn.Module) -> Iterator[tuple[str, tuple[bool, ...]]]:
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
    convolutions = (module for module in downsampler.modules() if isinstance(module, nn.Conv2d))
    return any(module.stride == (2, 2) and module.padding == (1, 1) for module in convolutions)


def _norm_before(name: str, modules: dict[str, nn.Module]) -> nn.Module | None:
    parent, _, own = name.rpartition(".")
    return modules.get(f"{parent}.{own.replace('attn', 'norm')}") if own in ("attn1", "attn2") else None


def _follows_convolution(name: str, modules: dict[str, nn.Module]) -> bool:
    transformer, _, rest = name.partition(".transformer_blocks.")
    return rest.startswith("0.") and isinstance(modules.get(f"{transformer}.proj_in"), nn.Conv2d)


def _arguments(module: nn.Module, height: int, width: int, batch: int, fill: Fill) -> dict[str, Any]:
    config: Any = module.config
    names = inspect.signature(module.forward).parameters
    if "added_time_ids" in names:  # Stable Video Diffusion: frames before channels
        sample = fill(batch, 1, config.in_channels, height, width)
    else:
        frames = [1] * hasattr(module, "transformer_in") or [1] * ("motion_num_attention_heads" in config)
        sample = fill(batch, config.in_channels, *frames, height, width)
    arguments: dict[str, Any] = {"sample": sample, "timestep": some_timestep(sample.device)}
    if "encoder_hidden_states" in names:
        arguments["encoder_hidden_states"] = fill(batch, _TEXT_TOKENS, _text_width(config))
    if "added_time_ids" in names:
        arguments["added_time_ids"] = fill(batch, 3)
    if "controlnet_cond" in names:
        pixels = 2 ** (len(config.conditioning_embedding_out_channels) - 1)
        channels = config.get("conditioning_channels", 3)
        arguments["controlnet_cond"] = fill(batch, channels, height * pixels, width * pixels)
    if getattr(module, "class_embedding", None) is not None:
        arguments["class_labels"] = _class_labels(config, batch, fill)
    if config.get("addition_embed_type") == "text_time":
        pooled = config.projection_class_embeddings_input_dim - _TIME_IDS * config.addition_time_embed_dim
        sides = (height * SCALE, width * SCALE)
        sizes = sample.new_tensor([[*sides, 0, 0, *sides]]).expand(batch, -1)
        arguments["added_cond_kwargs"] = {"text_embeds": fill(batch, pooled), "time_ids": sizes}
    return arguments


def _text_width(config: Any) -> int:
    width = config.get("encoder_hid_dim") or config.cross_attention_dim
    return int(max(width) if isinstance(width, list | tuple) else width)


def _class_labels(config: Any, batch: int, fill: Fill) -> Tensor:
    kind = config.get("class_embed_type")
    if kind in ("projection", "simple_projection"):
        return fill(batch, config.projection_class_embeddings_input_dim)
    return fill(batch, 4 * config.block_out_channels[0]) if kind == "identity" else fill(batch).long()
