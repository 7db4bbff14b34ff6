"""Transformers that draw images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from elfatt_sd.attention.ordering import NO_GRID
from elfatt_sd.errors import ElfattError
from elfatt_sd.families.base import FRACTION, RISING, Family, Fill, Given, SelfAttention, some_timestep
from elfatt_sd.families.joint import JointFamily, grid_of_ids, named, read_once
from elfatt_sd.methods import Grid


class Flux(JointFamily):
    """`FluxTransformer2DModel`: text first, then the image, then reference images (Kontext)."""

    classes = ("FluxTransformer2DModel",)
    processors: ClassVar[tuple[str, ...]] = (
        "FluxAttnProcessor",
        "FluxAttnProcessor2_0",
        "FusedFluxAttnProcessor2_0",
        "FluxSingleAttnProcessor2_0",
    )
    blocks = (("transformer_blocks", "attn", "norm1"), ("single_transformer_blocks", "attn", "norm"))
    text = 512
    streams = ("encoder_hidden_states", "hidden_states")
    unit = FRACTION
    takes = "tokens"
    axes: ClassVar[int] = 3  # columns of the position ids; the second counts rows, the third one columns

    def place(self, module: nn.Module, given: dict[str, Any]) -> tuple[int, Grid]:
        ids = given["img_ids"]
        return given["encoder_hidden_states"].shape[1], NO_GRID if ids.is_meta else read_once(ids, grid_of_ids)

    def arguments(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        given = super().arguments(module, grid, batch, fill)
        sample = given["hidden_states"]
        ids, place = sample.new_zeros(grid.tokens, self.axes), torch.arange(grid.tokens, device=sample.device)
        ids[:, 1], ids[:, 2] = place // grid.columns, place % grid.columns
        return {**given, "img_ids": ids, "txt_ids": sample.new_zeros(self.text, self.axes)}


class FluxControlNet(Flux):
    """`FluxControlNetModel`: blocks of Flux; one that takes several kinds of images is told which by a text token."""

    classes = ("FluxControlNetModel",)

    def place(self, module: nn.Module, given: dict[str, Any]) -> tuple[int, Grid]:
        before, grid = super().place(module, given)
        return before + bool(module.union), grid

    def arguments(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        given = super().arguments(module, grid, batch, fill)
        given["controlnet_cond"] = given["hidden_states"]
        if module.input_hint_block is not None:  # three convolutions halve its image
            pixels = 8 * module.config.patch_size  # type: ignore[operator,union-attr]
            given["controlnet_cond"] = fill(batch, 3, grid.rows * pixels, grid.columns * pixels)
        return {**given, "controlnet_mode": fill(batch, 1).long()} if module.union else given


class Chroma(Flux):
    """`ChromaTransformer2DModel`: Flux without pooled text, where a mask leaves the padding of the text out."""

    classes = ("ChromaTransformer2DModel",)
    masks_text = True


class Flux2(Flux):
    """`Flux2Transformer2DModel`: text first, then the image, then reference images."""

    classes = ("Flux2Transformer2DModel",)
    processors = ("Flux2AttnProcessor", "Flux2ParallelSelfAttnProcessor")
    axes = 4

    def place(self, module: nn.Module, given: dict[str, Any]) -> tuple[int, Grid]:
        if (mode := given.get("kv_cache_mode")) is not None:
            raise ElfattError(
                f"kv_cache_mode={mode!r} keeps keys and values of reference images from its first step, which cannot "
                "be approximated; call elfatt_sd.remove_patch(pipe) first."
            )
        return super().place(module, given)


class QwenImage(JointFamily):
    classes = ("QwenImageTransformer2DModel",)
    processors = ("QwenDoubleStreamAttnProcessor2_0",)
    blocks = (("transformer_blocks", "attn", "img_norm1"),)
    text = 256
    streams = ("encoder_hidden_states", "hidden_states")
    unit = FRACTION
    takes = "tokens"
    default = Grid.image(166, 166)

    def latent(self, module: nn.Module) -> Grid:
        return Grid(5, 80, 80) if _is_layered(module) else super().latent(module)

    def place(self, module: nn.Module, given: dict[str, Any]) -> tuple[int, Grid]:
        """Of the shapes of images, the first is that of the one to be made.

        A layered model makes all but the last: its layers are frames.
        """
        shapes = given["img_shapes"][0]
        (frames, rows, columns), *others = shapes if isinstance(shapes, list) else [shapes]
        if _is_layered(module) and others:
            alike = all(tuple(shape) == (frames, rows, columns) for shape in others[:-1])
            frames = frames * len(others) if alike else 0
        return given["encoder_hidden_states"].shape[1], Grid(frames, rows, columns)

    def arguments(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        config: Any = module.config
        given = {**super().arguments(module, grid, batch, fill), "img_shapes": [[tuple(grid)]] * batch}
        if config.get("use_additional_t_cond"):
            given["additional_t_cond"] = fill(batch).long()
        if _is_layered(module):  # the image that is taken apart comes last
            layer = (1, grid.rows, grid.columns)
            given["img_shapes"] = [[layer] * (grid.frames + 1)] * batch
            given["hidden_states"] = fill(batch, grid.tokens + grid.rows * grid.columns, config.in_channels)
        return given


class QwenImageControlNet(QwenImage):
    """`QwenImageControlNetModel`: blocks of Qwen-Image."""

    classes = ("QwenImageControlNetModel",)

    def arguments(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        config: Any = module.config
        channels = config.in_channels + config.extra_condition_channels
        return {**super().arguments(module, grid, batch, fill), "controlnet_cond": fill(batch, grid.tokens, channels)}


def _is_layered(module: nn.Module) -> bool:
    config: Any = module.config
    return bool(config.get("use_layer3d_rope"))


_MULTIPLE = 32  # of tokens, that texts and images are padded to


class ZImage(JointFamily):
    """`ZImageTransformer2DModel`, which is given a list of images, or of lists of images."""

    classes = ("ZImageTransformer2DModel",)
    processors = ("ZSingleStreamAttnProcessor",)
    blocks = (("layers", "attention", "attention_norm1"),)
    text = 128
    unit = RISING

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        """Return what a call was given; images of several sizes have no grid.

        Rows of several images (Omni) are texts, images of which the last one is to be made, and what an encoder sees in
        them. Where those before it are not equally long in all rows, it has no grid.
        """
        given = named(module, args, kwargs)
        rows, side, time = given["x"], given.get("patch_size", 2), given.get("f_patch_size", 1)
        several = isinstance(rows[0], list)
        images = [row[-1] for row in rows] if several else rows
        grids = {_grid(image, side, time) for image in images}
        starts = set() if several else {0}
        for row, texts in zip(rows, given["cap_feats"], strict=True) if several else ():
            seen = (_MULTIPLE if other is None else _grid(other, side, time).tokens for other in row[:-1])
            starts.add(sum(-(-length // _MULTIPLE) * _MULTIPLE for length in (*map(len, texts), *seen)))
        grid = grids.pop() if len(grids) == len(starts) == 1 else NO_GRID
        sample = images[0][None].expand(len(images), *images[0].shape)
        if not torch.is_grad_enabled() and all(image.shape == images[0].shape for image in images):
            sample = torch.stack(images)
        return Given(sample, given["t"], grid, before=starts.pop(), unit=RISING)

    def arguments(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        embedder, texts = module.all_x_embedder["2-1"], module.cap_embedder  # type: ignore[index]
        sample = fill(embedder.in_features // 4, grid.frames, 2 * grid.rows, 2 * grid.columns)  # type: ignore[union-attr]
        return {
            "x": [sample] * batch,
            "t": some_timestep(sample.device, RISING).expand(batch),
            "cap_feats": [fill(self.text, texts[0].weight.shape[0])] * batch,  # type: ignore[index,union-attr]
        }


class ZImageControlNet(ZImage):
    """`ZImageControlNetModel`: it shares the embeddings and refiners of its transformer, which a call needs."""

    classes = ("ZImageControlNetModel",)
    blocks = (("control_layers", "attention", "attention_norm1"),)

    def arguments(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        given = super().arguments(module, grid, batch, fill)
        control = fill(module.config.control_in_dim, *given["x"][0].shape[1:])  # type: ignore[union-attr]
        return {**given, "control_context": [control] * batch}


def _grid(image: Tensor, side: int, time: int) -> Grid:
    _, frames, rows, columns = map(int, image.shape)
    return Grid(frames // time, rows // side, columns // side)


class StableDiffusion3(JointFamily):
    """`SD3Transformer2DModel`; in 3.5 medium, some blocks have a second attention over the image alone."""

    classes = ("SD3Transformer2DModel",)
    processors = ("JointAttnProcessor2_0", "FusedJointAttnProcessor2_0")
    text = 333
    streams = ("encoder_hidden_states", "hidden_states")
    merges = True
    default = patch = None
    takes = "image"

    def layers(self, module: nn.Module) -> list[SelfAttention]:
        """Return the attention of every block, and the second one where there is one."""
        layers = []
        for index, block in enumerate(module.transformer_blocks):  # type: ignore[arg-type]
            name = f"transformer_blocks.{index}.attn"
            layers.append(self.layer(name, block.attn, block.norm1))
            if getattr(block, "attn2", None) is not None:
                layers.append(replace(self.layer(f"{name}2", block.attn2, block.norm1), text=0))
        return layers


class SD3ControlNet(StableDiffusion3):
    """`SD3ControlNetModel`: blocks of Stable Diffusion 3; that of 3.5 large has no text, and is given tokens."""

    classes = ("SD3ControlNetModel",)

    def layers(self, module: nn.Module) -> list[SelfAttention]:
        layers = super().layers(module)
        return layers if module.context_embedder is not None else [replace(layer, text=0) for layer in layers]

    def place(self, module: nn.Module, given: dict[str, Any]) -> tuple[int, Grid]:
        return super().place(module, {"hidden_states": given["controlnet_cond"]})

    def arguments(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        config: Any = module.config
        given = super().arguments(module, grid, batch, fill)
        size = given["hidden_states"].shape[-2:]
        given["controlnet_cond"] = fill(batch, config.in_channels + config.extra_conditioning_channels, *size)
        if module.pos_embed is None:
            given["hidden_states"] = fill(batch, grid.tokens, module.inner_dim)
        return given


class PixArt(Family):
    """`PixArtTransformer2DModel`, whose patches are the tokens."""

    classes = ("PixArtTransformer2DModel",)
    merges = True

    def layers(self, module: nn.Module) -> list[SelfAttention]:
        patch: int = module.config.patch_size  # type: ignore[assignment,union-attr]
        rounding = (False,) * (patch.bit_length() - 1)
        return [
            SelfAttention(f"transformer_blocks.{index}.attn1", block.attn1, block.norm1, patch, rounding=rounding)
            for index, block in enumerate(module.transformer_blocks)  # type: ignore[arg-type]
        ]

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        given = named(module, args, kwargs)
        return Given.latent(given["hidden_states"], given["timestep"])

    def arguments(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        config: Any = module.config
        sample = fill(batch, config.in_channels, grid.rows, grid.columns)
        sizes: dict[str, Any] = {"resolution": None, "aspect_ratio": None}
        if module.use_additional_conditions:
            sizes = {"resolution": fill(batch, 2), "aspect_ratio": fill(batch, 1)}
        return {
            "hidden_states": sample,
            "encoder_hidden_states": fill(batch, 120, config.caption_channels or config.cross_attention_dim),
            "timestep": some_timestep(sample.device).expand(batch),
            "added_cond_kwargs": sizes,
        }
