"""Transformers that draw videos."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from elfatt_sd.attention.ordering import NO_GRID
from elfatt_sd.families.base import Fill, SelfAttention, some_timestep
from elfatt_sd.families.joint import JointFamily, read_once
from elfatt_sd.methods import Grid


class Wan(JointFamily):
    """`WanTransformer3DModel`; 2.2 goes on with a second one in the low noise."""

    classes = ("WanTransformer3DModel",)
    processors = ("WanAttnProcessor", "WanAttnProcessor2_0")
    blocks = (("blocks", "attn1", "norm1"),)
    default = Grid(21, 60, 104)
    patch = None
    prompt, width = 512, "text_dim"

    def arguments(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        given = super().arguments(module, grid, batch, fill)
        config: Any = module.config
        rows = batch * (2 if config.get("pos_embed_seq_len") else 1)  # of the first frame, and of the last
        return (
            {**given, "encoder_hidden_states_image": fill(rows, 257, config.image_dim)} if config.image_dim else given
        )


class LTXVideo(JointFamily):
    """`LTXVideoTransformer3DModel`, which is given tokens, and their frames, rows and columns."""

    classes = ("LTXVideoTransformer3DModel",)
    processors = ("LTXVideoAttnProcessor", "LTXVideoAttentionProcessor2_0")
    blocks = (("transformer_blocks", "attn1", "norm1"),)
    default = Grid(21, 16, 22)
    patch = (1, 1, 1)
    takes, prompt, width = "tokens", 128, "caption_channels"

    def place(self, module: nn.Module, given: dict[str, Any]) -> tuple[int, Grid]:
        if (coordinates := given.get("video_coords")) is not None:
            return read_once(coordinates, _read_video)
        return 0, Grid(given["num_frames"], given["height"], given["width"])

    def arguments(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        given = super().arguments(module, grid, batch, fill)
        mask = given["encoder_hidden_states"].new_ones(batch, self.prompt)
        size = dict(zip(("num_frames", "height", "width"), grid, strict=True))
        return {**given, "encoder_attention_mask": mask, **size}


def _read_video(coordinates: Tensor) -> tuple[int, Grid]:
    """Read off coordinates `[batch, axes, tokens]` how many tokens of given frames come first, and the video's grid."""
    known = coordinates[0].to("cpu", torch.float64)
    before = int((known == known.amin(1, keepdim=True)).all(0).nonzero().amax())
    own = known[:, before:]
    axes = [axis.unique() for axis in own]
    whole = own.shape[1] == math.prod(map(len, axes)) and torch.equal(torch.cartesian_prod(*axes).T, own)
    return (before, Grid(*map(len, axes))) if whole else (0, NO_GRID)


class HunyuanVideo(JointFamily):
    """`HunyuanVideoTransformer3DModel`: blocks of both kinds."""

    classes = ("HunyuanVideoTransformer3DModel",)
    processors = ("HunyuanVideoAttnProcessor2_0",)
    blocks: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("transformer_blocks", "attn", "norm1"),
        ("single_transformer_blocks", "attn", "norm"),
    )
    text = 256
    masks_text = True
    default = Grid(33, 90, 160)
    patch = None
    width, guidance = "text_embed_dim", 6.0

    def arguments(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        given = super().arguments(module, grid, batch, fill)
        sample = given["hidden_states"]
        timestep = some_timestep(sample.device, dtype=sample.dtype).expand(batch)
        mask = torch.ones(batch, self.text, device=sample.device, dtype=torch.long)
        return {**given, "timestep": timestep, "encoder_attention_mask": mask}


class HunyuanVideo15(HunyuanVideo):
    """`HunyuanVideo15Transformer3DModel`: joint blocks alone, text of two encoders and of an image."""

    classes = ("HunyuanVideo15Transformer3DModel",)
    processors = ("HunyuanVideo15AttnProcessor2_0",)
    blocks = (("transformer_blocks", "attn", "norm1"),)
    text = 1000
    default = Grid(31, 45, 80)

    def arguments(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        config: Any = module.config
        given = super().arguments(module, grid, batch, fill)
        device = given["hidden_states"].device
        return {
            **given,
            "encoder_hidden_states_2": fill(batch, 256, config.text_embed_2_dim),
            "encoder_attention_mask_2": torch.ones(batch, 256, device=device, dtype=torch.long),
            "image_embeds": fill(batch, 729, config.image_embed_dim),
        }


class CogVideoX(JointFamily):
    """`CogVideoXTransformer3DModel`, which is given frames before channels."""

    classes = ("CogVideoXTransformer3DModel",)
    processors = ("CogVideoXAttnProcessor2_0", "FusedCogVideoXAttnProcessor2_0")
    blocks = (("transformer_blocks", "attn1", "norm1"),)
    default = Grid(13, 60, 90)
    patch = None
    prompt, width = 226, "text_embed_dim"

    def layers(self, module: nn.Module) -> list[SelfAttention]:
        text: int = module.config.max_text_seq_length  # type: ignore[assignment,union-attr]
        return [replace(layer, text=text) for layer in super().layers(module)]

    def place(self, module: nn.Module, given: dict[str, Any]) -> tuple[int, Grid]:
        _, frames, _, rows, columns = map(int, given["hidden_states"].shape)
        return given["encoder_hidden_states"].shape[1], self.grid(module, Grid(frames, rows, columns))

    def arguments(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        config: Any = module.config
        given = super().arguments(module, grid, batch, fill)
        given["hidden_states"] = given["hidden_states"].transpose(1, 2).contiguous()
        given["encoder_hidden_states"] = fill(batch, config.max_text_seq_length, config.text_embed_dim)
        given |= {"ofs": fill(1)} if config.get("ofs_embed_dim") else {}
        if config.use_rotary_positional_embeddings:
            turn = fill(grid.tokens, config.attention_head_dim)
            given["image_rotary_emb"] = (turn, turn)
        return given
