"""Transformers whose layers attend to tokens of an image or video, alone or joined with those of text.

Their attention processors differ in how they project, turn (rotary embedding) and join queries, keys and values; all
of them hand these to one function. A processor is therefore called as it is, with another function in its place: what
diffusers, PEFT or a quantisation changes in the projections holds with a patch as well.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from elfatt_sd.attention.ordering import NO_GRID
from elfatt_sd.devices import written
from elfatt_sd.families.base import Family, Fill, Given, SelfAttention, some_timestep
from elfatt_sd.methods import Grid

Read = TypeVar("Read")
DISPATCHED, PLAIN = "dispatch_attention_fn", "scaled_dot_product_attention"  # how processors call attention
READ: Any = WeakIdKeyDictionary()  # off ids of tokens, and what these were then


@dataclass(frozen=True)
class JointSelfAttention(SelfAttention):
    """A layer whose processor is called as it is, with another attention function."""

    joint: ClassVar[bool] = True

    # names of the classes of diffusers' own processors for it, which are plain softmax attention
    processors: tuple[str, ...] = ()
    masks_text: bool = False  # see `JointFamily`

    def knows(self, processor: object) -> bool:
        kind = type(processor)
        known = kind.__name__ in self.processors and kind.__module__.startswith("diffusers.")
        return known and attention_function(kind) is not None

    def obstacle_to(self, processor: object) -> str:
        if attention_function(type(processor)) is None:
            return f"it calls neither diffusers' {DISPATCHED} nor F.{PLAIN}, whose place a method takes"
        return super().obstacle_to(processor)


class JointFamily(Family):
    """What families of transformers have in common."""

    joint = True
    blocks: ClassVar[tuple[tuple[str, str, str], ...]] = ()  # lists of blocks, the attention in each and its norm
    processors: ClassVar[tuple[str, ...]] = ()  # see `JointSelfAttention`
    # whether the model's masks treat all image tokens alike, as queries and as keys, so that they can have a row for
    # each query, or be added to the logits
    masks_text = False
    default: ClassVar[Grid | None] = Grid.image(128, 128)  # the model's usual latent; None where its config says
    patch: ClassVar[tuple[int, int, int] | None] = (1, 2, 2)
    unit: ClassVar[int | None] = None  # of its timesteps; see `Given`
    # what a call is usually given
    takes = "video"  # the latent of a `video` or of an `image`, or its `tokens`
    prompt = 0  # tokens of a text that is not joined with the image
    width = "joint_attention_dim"  # of its config: channels of the text
    guidance = 3.5

    def latent(self, module: nn.Module) -> Grid:
        return self.default or super().latent(module)

    def grid(self, module: nn.Module, latent: Grid) -> Grid:
        return Grid(*(size // patch for size, patch in zip(latent, self.patch_of(module), strict=True)))

    def layers(self, module: nn.Module) -> list[SelfAttention]:
        return [
            self.layer(f"{blocks}.{index}.{attention}", getattr(block, attention), getattr(block, norm))
            for blocks, attention, norm in self.blocks
            for index, block in enumerate(getattr(module, blocks))
        ]

    def layer(self, name: str, attention: Any, norm: nn.Module | None) -> SelfAttention:
        return JointSelfAttention(
            name, attention, norm, 1, text=self.text, processors=self.processors, masks_text=self.masks_text
        )

    def place(self, module: nn.Module, given: dict[str, Any]) -> tuple[int, Grid]:
        """Return how many tokens of text come before the image's in a call, and the image's grid: here, of a latent."""
        shape = given["hidden_states"].shape
        return 0, self.grid(module, Grid(*map(int, shape[-3:] if len(shape) == 5 else (1, *shape[-2:]))))

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        """Return what a call of a model was given; of timesteps by token, the noisiest one."""
        given = named(module, args, kwargs)
        before, grid = self.place(module, given)
        timestep = given["timestep"].flatten(1).amax(1) if given["timestep"].ndim > 1 else given["timestep"]
        partial = bool(given.get("skip_layers"))  # of Stable Diffusion 3's guidance
        return Given(given["hidden_states"], timestep, grid, before=before, unit=self.unit, partial=partial)

    def arguments(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        config: Any = module.config
        sizes = [tokens * patch for tokens, patch in zip(grid, self.patch_of(module), strict=True)]
        latent = (config.in_channels, *sizes[self.takes == "image" :])
        sample = fill(batch, *((grid.tokens, config.in_channels) if self.takes == "tokens" else latent))
        width = config[self.width]  # none in a ControlNet of Stable Diffusion 3.5 large
        given = {
            "hidden_states": sample,
            "encoder_hidden_states": None if width is None else fill(batch, self.text or self.prompt, width),
            "timestep": some_timestep(sample.device, self.unit).expand(batch),
        }
        if "pooled_projections" in _argument_names(type(module).forward):
            given["pooled_projections"] = fill(batch, config.pooled_projection_dim)
        return {**given, "guidance": fill(batch) + self.guidance} if config.get("guidance_embeds") else given


def named(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    forward: Any = type(module).forward  # of the moment: TeaCache, for one, replaces that of a class
    return {**dict(zip(_argument_names(forward), args, strict=False)), **kwargs}


@functools.cache
def _argument_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


def read_once(ids: Tensor, read: Callable[[Tensor], Read]) -> Read:
    """Return what is read off ids. On a device, which has to be waited for, they are read again once written."""
    if ids.device.type == "cpu":  # where NumPy writes unseen
        return read(ids)
    state, known = written(ids), READ.get(ids)
    if known is None or known[0] != state:
        known = READ[ids] = state, read(ids)
    found: Read = known[1]
    return found


def grid_of_ids(ids: Tensor) -> Grid:
    """Read the grid off the position ids of an image, whose first column is 0; those of references follow."""
    known = (ids if ids.ndim == 2 else ids[0]).to("cpu", torch.float64)
    own = known[: int((known[:, 0] == known[0, 0]).long().cumprod(0).sum())]
    row, column = (own[:, axis] - own[:, axis].min() for axis in (1, 2))
    height, rest = divmod(len(own), width := int((row == 0).sum()))
    sides = [torch.arange(side, device="cpu").to(ids.dtype).double() for side in (height, width)]  # as they round
    whole = known[0, 0] == 0 and not rest and torch.equal(torch.cartesian_prod(*sides).T, torch.stack([row, column]))
    return Grid.image(height, width) if whole else NO_GRID


def attention_function(kind: type) -> str | None:
    call: Any = kind.__call__
    names = getattr(getattr(call, "__code__", None), "co_names", ())
    known = getattr(call, "__globals__", {})
    if DISPATCHED in names and DISPATCHED in known:
        return DISPATCHED
    return PLAIN if {PLAIN, "F"} <= set(names) and known.get("F") is nn.functional else None


def exact_function(kind: Any) -> Callable[..., Tensor]:
    dispatched: Callable[..., Tensor] = kind.__call__.__globals__.get(DISPATCHED, _plain)
    return dispatched if attention_function(kind) == DISPATCHED else _plain


def _plain(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def with_attention(kind: Any, attend: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return a class of processors' `__call__` with another attention function."""
    return _with_attention(kind.__call__, exact_function(kind), attend)


@functools.cache  # torch.compile wants the same function for all layers; others replace both it and what it calls
def _with_attention(call: Any, exact: Callable[..., Tensor], attend: Callable[..., Tensor]) -> Callable[..., Any]:
    names = {name: value for name, value in call.__globals__.items() if name != "__name__"}  # see torch.compile
    if exact is _plain:

        def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
            options |= dict(zip(("attn_mask", "dropout_p", "is_causal"), args, strict=False))
            q, k, v = (x.transpose(1, 2) for x in (query, key, value))
            return attend(_plain, q, k, v, **options).transpose(1, 2)

        names["F"] = types.ModuleType("functional")
        vars(names["F"]).update({**vars(nn.functional), PLAIN: attention})
    else:
        names[DISPATCHED] = functools.partial(attend, exact)
    made = types.FunctionType(call.__code__, names, call.__name__, call.__defaults__, call.__closure__)
    made.__kwdefaults__ = call.__kwdefaults__
    return made
