"""ELFATT in models that are there: vision transformers of timm, and others whose attention has the same parts."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from elfatt_sd import errors as checks
from elfatt_sd.errors import ElfattError, shortened
from elfatt_sd.nn.attention import UNKNOWN, ElfattAttention

# The parts of timm's `Attention`, all of which `ElfattAttention` has.
PARTS = {"qkv", "q_norm", "k_norm", "attn_drop", "norm", "proj", "proj_drop"}


def replace_attention(
    model: nn.Module, block_size: int | None = 64, every: int = 2, lepe: bool = True, **settings: Any
) -> int:
    """Replace attention of a vision transformer by `ElfattAttention`, with its projections; train the model afterwards.

    Nothing is replaced where one of the layers cannot be, or where a model of timm does not run with it. LePE begins at
    zero. `prefix_tokens` and `grid` are read from timm's `patch_embed` and what holds it; other models need them.

    Args:
        model: of timm, such as ViT, DeiT or DINOv2; or one whose layers of attention have the same parts.
        block_size: tokens in a window.
        every: which layers: 1 all, 2 the second, fourth and so on, as in level 3 of the paper's backbones.
        lepe: whether to add a convolution of the values.
        **settings: `global_fraction`, `global_heads`, `agents`, `prefix_tokens` and `grid` of `ElfattAttention`.

    Returns:
        The number of layers that were replaced; one that stands in several places is one.

    Raises:
        ElfattError: the attention cannot be replaced.
    """
    if not isinstance(model, nn.Module):
        raise ElfattError(f"{type(model).__name__} has no layers to replace; give a model of PyTorch.")
    checks.whole("every", every, 1)
    checks.flag("lepe", lepe)
    for name in settings:
        checks.choice("setting", name, ("global_fraction", "global_heads", "agents", "prefix_tokens", "grid"))
    kind, made, hooks = type(model).__name__, dict[Any, ElfattAttention](), list[Any]()
    inner: list[tuple[str, Any]] = [*model.named_modules()][1:]
    found = [each for each in inner if {"qkv", "proj"} <= each[1]._modules.keys()]
    owners: list[Any] = [each for each in model.modules() if hasattr(getattr(each, "patch_embed", None), "grid_size")]
    layers: dict[Any, list[ElfattAttention]] = {each: [] for each in owners}
    for name, old in found[every - 1 :: every]:
        if why := _reason(old):
            raise ElfattError(f"{name} of {kind} cannot be replaced: {why}; use another model, such as vit or deit.")
        owner = next((each for each in reversed(owners) if old in {*each.modules()}), None)
        weight: Any = old.qkv.weight
        own: Any = {"prefix_tokens": getattr(owner or model, "num_prefix_tokens", 0), "grid": UNKNOWN, **settings}
        own |= {"block_size": block_size, "lepe": lepe, "device": "meta", "dtype": weight.dtype}
        made[old] = new = ElfattAttention(weight.shape[1], old.num_heads, **own)
        layers.get(owner, []).append(new)
        for part, module in old.named_children():
            if part != "attn_drop":
                setattr(new, part, module)
        for parameter in () if new.lepe is None else new.lepe.to_empty(device=weight.device).parameters():
            nn.init.zeros_(parameter)
        new.train(old.training)
    if not made:
        raise ElfattError(f"{kind} has {len(found)} layers with qkv and proj, of which every={every} takes none.")
    failed = _failure(model)
    holders = [(each, leaf, old) for each in model.modules() for leaf, old in each._modules.items() if old in made]
    for holder, leaf, old in holders:
        setattr(holder, leaf, made[old])
    for owner in () if "grid" in settings else owners:  # a copy of the model has a hook of its own
        hooks.append(owner.patch_embed.register_forward_hook(functools.partial(_tell_grid, layers[owner])))
    if not failed and (why := _failure(model)):
        for holder, leaf, old in holders:
            setattr(holder, leaf, old)
        for hook in hooks:
            hook.remove()
        raise ElfattError(f"attention of {kind} cannot be replaced: with it the model fails ({why}).")
    return len(made)


def _failure(model: Any) -> str:
    """Return why timm's models in a model do not run on images of their size; empty if they do. Nothing is computed."""
    for each in (each for each in model.modules() if "input_size" in (getattr(each, "pretrained_cfg", None) or ())):
        sides = getattr(getattr(each, "patch_embed", None), "img_size", None) or each.pretrained_cfg["input_size"][1:]
        state = {name: value.to("meta") for name, value in [*each.named_parameters(), *each.named_buffers()]}
        first = next((part for part in each.modules() if isinstance(part, nn.Conv2d) and part.groups == 1), None)
        shape, dtype = (2, first.in_channels if first else 3, *sides), next(each.parameters()).dtype
        try:
            torch.func.functional_call(each, state, torch.empty(shape, device="meta", dtype=dtype), tie_weights=False)
        except Exception as error:  # of whatever kind a model raises
            return shortened(error).removesuffix(".")
    return ""


def _tell_grid(layers: list[ElfattAttention], embed: Any, _: Any, patches: Any) -> None:
    for layer in layers:  # patches in rows and columns are those of images of any size
        layer.grid = tuple(patches.shape[1:3]) if patches.ndim == 4 else embed.grid_size


def _reason(module: Any) -> str:
    """Return why a layer cannot be replaced; empty if it can."""
    kind, linear = type(module).__name__, module.qkv if isinstance(module.qkv, nn.Linear) else None
    others = {*dict(module.named_children()), *module._parameters, *module._buffers} - PARTS
    drop = getattr(getattr(module, "attn_drop", None), "p", 0.0)
    reasons = {
        f"{kind} is another attention than timm's Attention": kind != "Attention",
        f"its {', '.join(sorted(others))} would be lost": others,
        f"it has attn_drop={drop}": drop,
        "its heads are not as wide as its tokens": not linear or 3 * linear.in_features != linear.out_features,
    }
    return next((why for why, holds in reasons.items() if holds), "")
