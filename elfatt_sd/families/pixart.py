"""PixArt Alpha and Sigma: a transformer with self-attention over image tokens alone, and absolute positions."""

from __future__ import annotations

from typing import Any

from torch import nn

from elfatt_sd.families.base import Fill, Given, SelfAttention, latent_size, some_timestep
from elfatt_sd.methods import Grid

_TEXT_TOKENS = 120


class PixArt:
    """`PixArtTransformer2DModel`, whose patches are the tokens; see `families.base.Family`."""

    part = "transformer"
    title = "transformer"
    joint = False
    merges = True
    text = 0
    what = "PixArtTransformer2DModel"

    def matches(self, module: object) -> bool:
        return type(module).__name__ == "PixArtTransformer2DModel"

    def layers(self, module: nn.Module) -> list[SelfAttention]:
        patch: int = module.config.patch_size  # type: ignore[assignment,union-attr]
        rounding = (False,) * (patch.bit_length() - 1)
        return [
            SelfAttention(f"transformer_blocks.{index}.attn1", block.attn1, block.norm1, patch, rounding=rounding)
            for index, block in enumerate(module.transformer_blocks)  # type: ignore[arg-type]
        ]

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        sample = args[0] if args else kwargs["hidden_states"]
        timestep = args[2] if len(args) > 2 else kwargs["timestep"]
        return Given.latent(sample, timestep)

    def latent(self, module: nn.Module) -> Grid:
        return latent_size(module)

    def grid(self, module: nn.Module, latent: Grid) -> Grid:
        """Its input is the latent."""
        return latent

    def entrances(self, module: nn.Module) -> tuple[tuple[str, nn.Module], ...]:
        """Patches are cut before the timestep is embedded."""
        return ("sample", module.pos_embed), ("timestep", module.adaln_single)  # type: ignore[return-value]

    def takes_noise_levels(self, module: nn.Module) -> bool:
        """It takes timesteps."""
        return False

    def arguments(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        """Return arguments of a call."""
        config: Any = module.config
        sample = fill(batch, config.in_channels, grid.rows, grid.columns)
        sizes: dict[str, Any] = {"resolution": None, "aspect_ratio": None}
        if module.use_additional_conditions:
            sizes = {"resolution": fill(batch, 2), "aspect_ratio": fill(batch, 1)}
        return {
            "hidden_states": sample,
            "encoder_hidden_states": fill(batch, _TEXT_TOKENS, config.caption_channels or config.cross_attention_dim),
            "timestep": some_timestep(sample.device).expand(batch),
            "added_cond_kwargs": sizes,
        }
