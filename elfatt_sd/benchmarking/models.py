"""Models to time: UNets of known shapes with random weights, for which nothing is downloaded, and real pipelines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from elfatt_sd.benchmarking.variants import Size, height_and_width
from elfatt_sd.devices import standard_normal
from elfatt_sd.drawing.running import dimensions_of
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import family_of, find_layers, main_denoiser, unwrap
from elfatt_sd.families.shapes import SHAPE_VAE, TRANSFORMERS, call_arguments, empty_transformer, empty_unet
from elfatt_sd.families.shapes import SHAPES as SHAPES
from elfatt_sd.families.unet import SCALE
from elfatt_sd.loading import load_pipeline
from elfatt_sd.methods import Grid

VAE: dict[str, Any] = {
    **SHAPE_VAE,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "force_upcast": False,
}


@dataclass(frozen=True)
class Model:
    """A denoiser and what its inputs look like."""

    unet: nn.Module  # the denoiser, a UNet or a transformer of a known family
    scale: int  # pixels of the image to one of the latent, on each side
    # where copies that share its weights are kept, by what was made of them, for benchmarks that follow; None makes
    # them for each
    copies: dict[Any, Any] | None = None

    @property
    def least_size(self) -> int:
        """Side in pixels of a small image that every level can halve, and that has a few tokens at the deepest."""
        deepest = max(layer.downsample for layer in find_layers(self.unet))
        levels = len(getattr(unwrap(self.unet).config, "block_out_channels", ()))
        return int(max(2**levels, 2 * deepest) * self.scale)

    def inputs(self, size: Size, batch: int) -> dict[str, Any]:
        """Return the keyword arguments of a UNet call for images of `size` pixels."""
        height, width = height_and_width(size)
        if min(height, width) < self.scale or batch < 1:
            raise ElfattError(
                f"size={size}, batch={batch} is not accepted; give at least {self.scale} pixels and a batch of 1."
            )
        parameter = next(self.unet.parameters())
        generator = torch.Generator().manual_seed(0)

        def noise(*shape: int) -> Tensor:
            return standard_normal(shape, generator).to(parameter)

        module = unwrap(self.unet)
        family = family_of(module)
        latent = Grid(family.latent(module).frames, height // self.scale, width // self.scale)
        return call_arguments(module, family.grid(module, latent), batch, noise)


def unet_call(unet: nn.Module, inputs: Mapping[str, Any]) -> Callable[[], Any]:
    """Return a function that calls a denoiser, without gradients; its sample by position, as tomesd wants it."""
    (_, sample), *others = inputs.items()

    def call() -> Any:
        with torch.inference_mode():
            return unet(sample, **dict(others)).sample

    return call


def make_model(name: str, device: torch.device, dtype: torch.dtype, variant: str | None = None) -> Model:
    """Build a model of a known shape with random weights, or take a pipeline's (`toy`, a path, a hub id).

    Of a transformer, a few blocks are built: the whole of one fits few machines, and its blocks are alike.
    """
    if name in TRANSFORMERS:
        shape = TRANSFORMERS[name]
        return Model(fill(empty_transformer(shape, few=True), device, dtype).eval(), shape.scale)
    if name in SHAPES:
        return Model(random_unet(SHAPES[name], device, dtype), SCALE)
    pipe = load_pipeline(name, device=str(device), dtype=dtype, variant=variant)
    return Model(main_denoiser(pipe), dimensions_of(pipe).factor)


def make_pipeline(
    name: str, device: torch.device, dtype: torch.dtype, batch: int, variant: str | None = None
) -> tuple[Any, dict[str, Any]]:
    """Return a pipeline and its inputs; one with random weights is given embeddings."""
    if name in TRANSFORMERS:
        raise ElfattError(f"model={name!r} has no pipeline here; time a call of it with elfatt-sd bench denoiser.")
    if name not in SHAPES:
        pipe = load_pipeline(name, device=str(device), dtype=dtype, variant=variant)
        return pipe, {"prompt": ["a red circle"] * batch}
    import diffusers

    library: Any = diffusers
    with torch.device("meta"):
        vae = library.AutoencoderKL(**VAE)
    model = make_model(name, device, dtype)
    parts = {
        "unet": model.unet,
        "vae": fill(vae, device, dtype).eval(),
        "scheduler": library.DDIMScheduler(steps_offset=1, clip_sample=False),
        "text_encoder": None,
        "tokenizer": None,
    }
    example = model.inputs(8 * model.scale, batch)
    text = example["encoder_hidden_states"]
    inputs = {"prompt_embeds": text, "negative_prompt_embeds": torch.zeros_like(text)}
    if name == "sd15":
        unused = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
        return library.StableDiffusionPipeline(**parts, **unused), inputs
    pooled = example["added_cond_kwargs"]["text_embeds"]
    inputs |= {"pooled_prompt_embeds": pooled, "negative_pooled_prompt_embeds": torch.zeros_like(pooled)}
    return library.StableDiffusionXLPipeline(**parts, text_encoder_2=None, tokenizer_2=None), inputs


def random_unet(shape: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Build a UNet whose weights are drawn on the device, without a copy in float32."""
    filled: nn.Module = fill(empty_unet(shape), device, dtype).eval()
    return filled


def fill(module: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Draw the weights of a module on the meta device: uniform by fan-in, norms 1, biases 0."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    module = module.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim > 1:
                bound = parameter[0].numel() ** -0.5
                parameter.uniform_(-bound, bound, generator=generator)
            else:
                parameter.fill_(float(name.endswith("weight")))
    return module.requires_grad_(False)
