"""ELFATT in models that are there: vision transformers of timm, and others whose attention has the same parts."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from elfatt_sd import errors as checks
from elfatt_sd.errors import ElfattError
from elfatt_sd.nn.attention import ElfattAttention

# The parts of timm's `Attention`, all of which `ElfattAttention` has.
PARTS = {"qkv", "q_norm", "k_norm", "attn_drop", "norm", "proj", "proj_drop"}


def replace_attention(
    model: nn.Module, block_size: int | None = 64, every: int = 2, lepe: bool = True, **settings: Any
) -> int:
    """Replace attention of a vision transformer by `ElfattAttention`, with its projections; train the model afterwards.

    Nothing is replaced where one of the layers cannot be. LePE begins at zero.

    Args:
        model: of timm, such as ViT, DeiT or DINOv2; or one whose layers of attention have the same parts.
        block_size: tokens in a window.
        every: which layers: 1 all, 2 the second, fourth and so on, as in level 3 of the paper's backbones.
        lepe: whether to add a convolution of the values.
        **settings: further arguments of `ElfattAttention`, such as `global_fraction`.

    Returns:
        The number of layers that were replaced.

    Raises:
        ElfattError: the attention cannot be replaced.
    """
    checks.whole("every", every, 1)
    settings = {"prefix_tokens": getattr(model, "num_prefix_tokens", 0), **settings}
    kind, made = type(model).__name__, dict[str, ElfattAttention]()
    found = [name for name, module in model.named_modules() if hasattr(module, "qkv") and hasattr(module, "proj")]
    for name in found[every - 1 :: every]:
        old: Any = model.get_submodule(name)
        if why := _reason(old):
            raise ElfattError(f"{name} of {kind} cannot be replaced: {why}; use another model, such as vit or deit.")
        weight: Any = old.qkv.weight
        own: Any = {"block_size": block_size, "lepe": lepe, **settings}
        made[name] = new = ElfattAttention(weight.shape[1], old.num_heads, device="meta", dtype=weight.dtype, **own)
        for part, module in old.named_children():
            if part != "attn_drop":
                setattr(new, part, module)
        for parameter in () if new.lepe is None else new.lepe.to_empty(device=weight.device).parameters():
            nn.init.zeros_(parameter)
        new.train(old.training)
    if not made:
        raise ElfattError(f"{kind} has {len(found)} layers with qkv and proj, of which every={every} takes none.")
    for name, new in made.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, new)
    embed = getattr(model, "patch_embed", None)
    if isinstance(embed, nn.Module) and hasattr(embed, "grid_size") and "grid" not in settings:
        embed.register_forward_hook(functools.partial(_tell_grid, [*made.values()]))  # a copy of the model has its own
    return len(made)


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
