"""The denoisers that can be patched, and how they are found in a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from elfatt_sd.config import PatchConfig
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import images, videos
from elfatt_sd.families.base import Family as Family
from elfatt_sd.families.base import Given as Given
from elfatt_sd.families.base import SelfAttention as SelfAttention
from elfatt_sd.families.base import copy_structure as copy_structure
from elfatt_sd.families.base import replaceable as replaceable
from elfatt_sd.families.base import unwrap as unwrap
from elfatt_sd.families.unet import UNet

SECOND = "transformer_2"  # of Wan 2.2: it goes on in the low noise, with or without a first one
FAMILIES: tuple[Family, ...] = (
    UNet(),
    *(images.PixArt(), images.StableDiffusion3(), images.SD3ControlNet()),
    *(images.Flux(), images.FluxControlNet(), images.Chroma(), images.Flux2()),
    *(images.QwenImage(), images.QwenImageControlNet(), images.ZImage(), images.ZImageControlNet()),
    *(videos.Wan(), videos.LTXVideo(), videos.HunyuanVideo(), videos.HunyuanVideo15(), videos.CogVideoX()),
)


def is_denoiser(module: object) -> bool:
    return isinstance(module, nn.Module) and any(family.matches(unwrap(module)) for family in FAMILIES)


def family_of(module: nn.Module) -> Family:
    inner = unwrap(module)
    if found := [family for family in FAMILIES if family.matches(inner)]:
        return found[0]
    name, known = type(inner).__name__, ", or ".join(family.what or ", ".join(family.classes) for family in FAMILIES)
    raise ElfattError(
        f"not supported: {name} cannot be patched. Give a diffusers pipeline with {known}; or such a module."
    )


def find_denoisers(target: Any) -> dict[str, nn.Module]:
    """Return the denoiser of a pipeline and its ControlNets, by name: the denoiser first."""
    if isinstance(target, type):
        raise ElfattError(f"{target.__name__} is a class; give an instance, such as from_pretrained returns.")
    parts = dict.fromkeys((*(family.part for family in FAMILIES), SECOND))
    held = {part: module for part in parts if isinstance(module := getattr(target, part, None), nn.Module)}
    if isinstance(target, nn.Module) and (is_denoiser(target) or not held):  # others train several models at once
        return {family_of(target).part: target}
    if not held:
        components = ", ".join(getattr(target, "components", {})) or "none"
        for part in parts:
            if getattr(target, part, None) is not None:
                components = f"{part}, which is a {type(getattr(target, part)).__name__} and no module of PyTorch"
        raise ElfattError(
            f"{type(target).__name__} has no UNet and no transformer (its parts: {components}); give a diffusers "
            "pipeline with one, or a UNet or transformer."
        )
    name, denoiser = next(iter(held.items()))
    more = {SECOND: held[SECOND]} if SECOND in held else {}
    for each in (denoiser, *more.values()):
        family_of(each)
    controlnet = getattr(target, "controlnet", None)
    nets = list(controlnet) if isinstance(controlnet, list | tuple) else list(getattr(controlnet, "nets", [controlnet]))
    nets = list({id(unwrap(net)): net for net in nets if is_denoiser(net)}.values())  # one may take several images
    names = [f"controlnet.{index}" for index in range(len(nets))] if len(nets) > 1 else ["controlnet"]
    return {name: denoiser, **more, **dict(zip(names, nets, strict=False))}


def takes_steps(name: str) -> bool:
    """Tell by its name among `find_denoisers` whether it is not a ControlNet."""
    return not name.startswith("controlnet")


def step_denoisers(target: Any) -> dict[str, Any]:
    """Return the denoisers of which each step calls one, without ControlNets: Wan 2.2 has two, each for its steps."""
    return {name: net for name, net in find_denoisers(target).items() if takes_steps(name)}


def main_denoiser(target: Any) -> Any:
    return next(iter(find_denoisers(target).values()))


def find_layers(denoiser: nn.Module) -> list[SelfAttention]:
    return family_of(denoiser).layers(unwrap(denoiser))


def levels_of(layers: Iterable[SelfAttention]) -> list[int]:
    return sorted({layer.downsample for layer in layers})


def select_layers(layers: list[SelfAttention], config: PatchConfig, levels: Sequence[int]) -> list[SelfAttention]:
    limit: int | None = config.max_downsample
    if limit is None:
        limit = levels[: config.levels][-1] if levels else 0
    if not config.per_layer:
        return [layer for layer in layers if layer.downsample <= limit]
    named = {layer.name for own in config.per_layer for layer in layers if own.matches(layer.name)}
    found = [layer for layer in layers if layer.downsample <= limit or layer.name in named]
    return [layer for layer in found if config.for_layer(layer.name).active]
