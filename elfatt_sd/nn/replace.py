"""ELFATT in models that are there: vision transformers of timm, and others whose attention has the same parts."""

from __future__ import annotations

import inspect
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
    kind = type(model).__name__
    found = [name for name, module in model.named_modules() if hasattr(module, "qkv") and hasattr(module, "proj")]
    chosen = found[every - 1 :: every]
    if not chosen:
        raise ElfattError(f"{kind} has {len(found)} layers with qkv and proj, of which every={every} takes none.")
    settings = {"prefix_tokens": getattr(model, "num_prefix_tokens", 0), **settings}
    made: dict[str, ElfattAttention] = {}
    for name in chosen:
        old = model.get_submodule(name)
        if why := _reason(old):
            raise ElfattError(f"{name} of {kind} cannot be replaced: {why}; use another model, such as vit or deit.")
        made[name] = _successor(old, block_size=block_size, lepe=lepe, **settings)
    for name, new in made.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, new)
    embed = getattr(model, "patch_embed", None)
    if isinstance(embed, nn.Module) and hasattr(embed, "grid_size") and "grid" not in settings:

        def tell_grid(module: Any, _: Any, patches: Any) -> None:
            for new in made.values():  # tokens as rows and columns are those of images of any size
                new.grid = tuple(patches.shape[1:3]) if patches.ndim == 4 else module.grid_size

        embed.register_forward_hook(tell_grid)
    return len(made)


def _reason(module: Any) -> str:
    """Return why a layer cannot be replaced; empty if it can."""
    kind = type(module).__name__
    others = {*dict(module.named_children()), *module._parameters, *module._buffers} - PARTS
    unknown = {*inspect.signature(module.forward).parameters} - {"x", "attn_mask", "is_causal"}
    qkv = module.qkv
    if isinstance(module, ElfattAttention):
        return "it is ELFATT already"
    if kind != "Attention":
        return f"{kind} is another attention than timm's Attention"
    if others:
        return f"its {', '.join(sorted(others))} would be lost"
    if unknown:
        return f"it is called with {', '.join(sorted(unknown))}"
    if not (isinstance(qkv, nn.Linear) and qkv.out_features == 3 * qkv.in_features):
        return "its heads are not as wide as its tokens"
    if drop := getattr(getattr(module, "attn_drop", None), "p", 0.0):
        return f"it has attn_drop={drop}"
    return ""


def _successor(old: Any, **settings: Any) -> ElfattAttention:
    """Make an `ElfattAttention` with the parts of a layer of attention, and LePE of zeros."""
    weight = old.qkv.weight
    new = ElfattAttention(weight.shape[1], old.num_heads, device="meta", dtype=weight.dtype, **settings)
    for name, part in old.named_children():
        if name != "attn_drop":
            setattr(new, name, part)
    if new.lepe is not None:
        new.lepe.to_empty(device=weight.device)
        for parameter in new.lepe.parameters():
            nn.init.zeros_(parameter)
    return new.train(old.training)
