"""CogVideoX: one attention over text and video, the text first."""

from __future__ import annotations

from typing import Any

from torch import nn

from elfatt_sd.families.base import Fill, Given, SelfAttention, some_timestep
from elfatt_sd.families.joint import JointFamily, named
from elfatt_sd.methods import Grid


class CogVideoX(JointFamily):
    """`CogVideoXTransformer3DModel`, which is given frames before channels."""

    classes = ("CogVideoXTransformer3DModel",)
    processors = ("CogVideoXAttnProcessor2_0", "FusedCogVideoXAttnProcessor2_0")
    default = Grid(13, 60, 90)

    def patch_of(self, module: nn.Module) -> tuple[int, int, int]:
        config: Any = module.config
        return config.get("patch_size_t") or 1, config.patch_size, config.patch_size

    def layers(self, module: nn.Module) -> list[SelfAttention]:
        text: int = module.config.max_text_seq_length  # type: ignore[assignment,union-attr]
        return self.blocks(module, "transformer_blocks", "attn1", "norm1", text)

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        given = named(module, args, kwargs)
        sample = given["hidden_states"]
        _, frames, _, rows, columns = map(int, sample.shape)
        grid = self.grid(module, Grid(frames, rows, columns))
        return Given(sample, given["timestep"], grid, before=given["encoder_hidden_states"].shape[1])

    def arguments(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        """Return arguments of a call."""
        config: Any = module.config
        frames, rows, columns = (size * patch for size, patch in zip(grid, self.patch_of(module), strict=True))
        sample = fill(batch, frames, config.in_channels, rows, columns)
        given: dict[str, Any] = {
            "hidden_states": sample,
            "encoder_hidden_states": fill(batch, config.max_text_seq_length, config.text_embed_dim),
            "timestep": some_timestep(sample.device).expand(batch),
        }
        if config.use_rotary_positional_embeddings:
            turn = fill(grid.tokens, config.attention_head_dim)
            given["image_rotary_emb"] = (turn, turn)
        return given
