"""What a denoiser is to a method: its self-attention layers, their grids, and what its calls are given."""

from __future__ import annotations

import copy
import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Self, TypeVar

import torch
from diffusers import ModelMixin
from diffusers.models import attention_processor
from torch import Tensor, nn
from torch.nn import functional

from elfatt_sd.errors import ElfattError
from elfatt_sd.families.cuts import OUTPUT, Block, Part, Whole
from elfatt_sd.methods import Grid

Module = TypeVar("Module", bound=nn.Module)
Fill = Callable[..., Tensor]
FRACTION, RISING = 0, 1  # units of a timestep: what is left of the run, and how much of it is done
STEP = 720  # of 1000: the first of those that share something, whether 2, 3, 4, 5, 6 or 8 do


@dataclass(frozen=True)
class Given:
    """What a call of a denoiser was given."""

    sample: Tensor  # the input, `[batch, ...]`
    timestep: Any  # of the call
    grid: Grid  # of the input: that of the latent or, where the input is tokens, theirs
    _: KW_ONLY
    before: int = 0  # tokens of text before those of the image, in the sequence that attention sees
    frames: int = 1  # of a clip, each of which is a row of the layers' batch
    unit: int | None = None  # of the timestep, of `runtime.schedule`; None for timesteps
    partial: bool = False  # whether the call leaves out some layers
    whole: bool = False  # whether all of it has to be run
    differentiated: bool = False  # whether it has gradients, for which a checkpoint may compute it once more
    compiled: bool = False  # whether `torch.compile` serves it or a part of it

    @classmethod
    def latent(cls, sample: Tensor, timestep: Any) -> Self:
        return cls(sample, timestep, Grid.image(*map(int, sample.shape[-2:])))

    @property
    def rows(self) -> int:
        """Of the layers' batch."""
        return len(self.sample) * self.frames


class PlainProjections:
    """What `AttnProcessor2_0` does around attention in one call: from what a layer is given to tokens, and back.

    `tokens` are those of the image, `[batch, tokens, channels]`; q, k and v are `[batch, tokens, heads, head_dim]`.
    """

    def __init__(self, attention: Any, hidden_states: Tensor, temb: Tensor | None = None, fused: bool = False) -> None:
        self._attention = attention
        self._fused = fused
        self._given = hidden_states
        if attention.spatial_norm is not None:
            hidden_states = attention.spatial_norm(hidden_states, temb)
        if hidden_states.ndim == 4:
            hidden_states = hidden_states.flatten(2).transpose(1, 2)
        if attention.group_norm is not None:
            hidden_states = attention.group_norm(hidden_states.transpose(1, 2)).transpose(1, 2)
        self.tokens = hidden_states

    @staticmethod
    def obstacle(
        grid: Grid, hidden_states: Tensor, encoder_hidden_states: Tensor | None, attention_mask: Tensor | None
    ) -> str:
        """Return why a layer cannot be approximated in this call; empty if it can."""
        if encoder_hidden_states is not None:
            return "it was given other tokens to attend to"
        if attention_mask is not None:
            return "it was given an attention mask"
        shape = hidden_states.shape
        tokens = shape[2] * shape[3] if hidden_states.ndim == 4 else shape[1]
        return "" if tokens == grid.tokens else f"it was given {tokens} tokens in place of {grid.rows}x{grid.columns}"

    def project(self, tokens: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v; k and v of the tokens at the places `keys` alone."""
        attention = self._attention
        if self._fused and keys is not None and getattr(attention.to_qkv.forward, "__func__", 0) is nn.Linear.forward:
            # all tokens to queries, and some of them to keys and values, by the parts of the fused weight
            weight, bias, cut = attention.to_qkv.weight, attention.to_qkv.bias, attention.to_qkv.out_features // 3
            first, others = (None, None) if bias is None else (bias[:cut], bias[cut:])
            query = functional.linear(tokens, weight[:cut], first)
            key, value = functional.linear(tokens.index_select(1, keys), weight[cut:], others).chunk(2, dim=-1)
        elif self._fused:  # with a LoRA, in few bits, or with a hook that brings weights
            query, key, value = attention.to_qkv(tokens).chunk(3, dim=-1)
            if keys is not None:
                key, value = key.index_select(1, keys), value.index_select(1, keys)
        else:
            source = tokens if keys is None else tokens.index_select(1, keys)
            query, key, value = attention.to_q(tokens), attention.to_k(source), attention.to_v(source)
        return self._heads(query, attention.norm_q), self._heads(key, attention.norm_k), self._heads(value, None)

    def queries(self, tokens: Tensor) -> Tensor:
        return self._heads(self._attention.to_q(tokens), self._attention.norm_q)

    def output(self, mixed: Tensor) -> Tensor:
        projection, dropout = self._attention.to_out
        projected: Tensor = dropout(projection(mixed.flatten(2)))
        return projected

    def close(self, tokens: Tensor) -> Tensor:
        if self._given.ndim == 4:
            tokens = tokens.transpose(1, 2).reshape(self._given.shape)
        if self._attention.residual_connection:
            tokens = tokens + self._given
        factor = self._attention.rescale_output_factor
        return tokens if factor == 1 else tokens / factor

    def _heads(self, projected: Tensor, norm: nn.Module | None) -> Tensor:
        split: Tensor = projected.view(*projected.shape[:2], self._attention.heads, -1)
        return split if norm is None else norm(split)


# Processors that compute softmax attention of a layer's own projections, and nothing else.
_PLAIN = (
    "AttnProcessor",
    "AttnProcessor2_0",
    "AttnProcessorNPU",
    "FusedAttnProcessor2_0",
    "LoRAAttnProcessor",
    "LoRAAttnProcessor2_0",
    "LoRAXFormersAttnProcessor",
    "SlicedAttnProcessor",
    "XFormersAttnProcessor",
    "XLAFlashAttnProcessor2_0",
)
# Attributes by which processors hand maps of attention on: a store that wants them of every layer in every call.
_RECORDS = ("attnstore", "attention_store", "controller", "attention_probs")


@dataclass(frozen=True)
class SelfAttention:
    """A self-attention layer over the tokens of an image."""

    # whether its processor is called with another attention function; see `families.joint`
    joint: ClassVar[bool] = False
    projections: ClassVar[type[PlainProjections]] = PlainProjections  # what it does around attention

    name: str  # its path in the denoiser, `down_blocks.0.attentions.0.transformer_blocks.0.attn1`
    attention: Any  # the module
    # the normalisation before it, whose input is the block's input; None where the layer normalises itself
    norm: nn.Module | None
    downsample: int  # how many times smaller than the latent its grid is, on each side
    channels_first: bool = False  # whether the block's input lies channels first in memory, as a convolution left it
    # of each halving of the grid on the way down to it, whether odd sides are rounded up
    rounding: tuple[bool, ...] = ()
    text: int = 0  # tokens of text that it joins with those of the image, at their usual number; 0 if it does not

    def grid(self, given: Grid) -> Grid:
        frames, height, width = given
        halvings = self.downsample.bit_length() - 1
        for up in (*self.rounding, *[True] * halvings)[:halvings]:
            height, width = (height + up) // 2, (width + up) // 2
        return Grid(frames, height, width)

    @property
    def heads(self) -> int:
        return int(self.attention.heads)

    @property
    def channels(self) -> int:
        """Channels over all heads."""
        return int(self.attention.inner_dim)

    def knows(self, processor: object) -> bool:
        """Tell whether a processor of it is plain attention, whose place a method may take."""
        kind = type(processor)
        return kind.__name__ in _PLAIN and getattr(attention_processor, kind.__name__, None) is kind

    def obstacle_to(self, processor: object) -> str:
        """Return why a processor that is named cannot be taken over; empty if it can."""
        if any(hasattr(processor, attribute) for attribute in _RECORDS):
            return "it keeps the attention maps of every layer, and the pipeline fails without them"
        few = getattr(self.attention, "inner_kv_dim", self.channels) != self.channels
        return "its keys have fewer heads than its queries" if few else ""

    @property
    def processor(self) -> Any:
        """Its own attention processor, also while it is patched."""
        return self.attention.get_processor()

    @property
    def obstacle(self) -> str:
        """Why its processor is left alone; empty if it is plain attention."""
        name = type(self.processor).__name__
        return "" if self.knows(self.processor) else f"its processor, {name}, is not known to be plain attention"


class Family(ABC):
    """A kind of denoiser."""

    part = "transformer"  # where a pipeline holds it
    title = "transformer"  # how it is called in sentences
    classes: ClassVar[tuple[str, ...]] = ()  # of diffusers
    what = ""  # which others are meant, for error messages
    joint = False  # whether its layers are `families.joint.JointSelfAttention`
    merges = False  # whether image tokens may be merged: their positions are added to them, and not in the attention
    text = 0  # usual number of text tokens that its layers join with those of the image
    # frames, rows and columns of the latent to a token; None where its config says
    patch: ClassVar[tuple[int, int, int] | None] = None
    streams: ClassVar[tuple[str, ...]] = ("hidden_states", "encoder_hidden_states")  # that its blocks return, in order

    def matches(self, module: object) -> bool:
        """Tell whether a module, without wrappers, is of this family."""
        return type(module).__name__ in self.classes and type(module).__module__.startswith("diffusers.")

    @abstractmethod
    def layers(self, module: nn.Module) -> list[SelfAttention]:
        """Return the self-attention layers over image tokens, in the order of the modules."""

    @abstractmethod
    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        """Return what a call was given."""

    @abstractmethod
    def arguments(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        """Return keyword arguments that it can be called with."""

    def latent(self, module: nn.Module) -> Grid:
        """Return the grid of the model's own latent size."""
        own = getattr(getattr(module, "config", None), "sample_size", None) or 64
        rows, columns = own if isinstance(own, list | tuple) else (own, own)
        return Grid.image(int(rows), int(columns))

    def patch_of(self, module: nn.Module) -> tuple[int, int, int]:
        if self.patch is not None:
            return self.patch
        config: Any = module.config
        side = config.get("patch_size", 1)
        return tuple(side) if isinstance(side, list | tuple) else (config.get("patch_size_t") or 1, side, side)

    def grid(self, module: nn.Module, latent: Grid) -> Grid:
        """Return the grid that a layer attends over, for a latent: one frame, where clips have each on its own."""
        return latent._replace(frames=1)

    def cuts(self, module: nn.Module) -> list[str]:
        """Return where it may be cut: `blocks-F-B` runs the first F and the last B of its blocks in every step."""
        count = sum(map(len, self._stacks(module).values()))
        ends = dict.fromkeys([(1, 0), (1, 1), (max(1, count // 8), max(1, count // 8))])
        return [f"blocks-{first}-{last}" for first, last in ends if first + last < count]

    def cut(self, module: nn.Module, name: str) -> list[Part]:
        """Return the parts of a cut.

        Raises:
            ElfattError: there is no such cut.
        """
        if name == OUTPUT:
            return [Whole(module)]
        stacks, blocks = self._stacks(module), re.fullmatch(r"blocks-(\d+)-(\d+)", name)
        places = [(stack, block) for stack, held in stacks.items() for block in held]
        within = places[int(blocks[1]) : len(places) - int(blocks[2])] if blocks else []
        if not within:
            known = ", ".join([*self.cuts(module), OUTPUT])
            raise ElfattError(f"cut={name!r} is not accepted; {type(module).__name__} has {known}.")
        parts: list[Part] = []
        for stack, each in itertools.groupby(within, lambda place: place[0]):
            held = [block for _, block in each]
            parts += [Block(block, stack, block is held[0], block is held[-1], self.streams) for block in held]
        return parts

    def _stacks(self, module: nn.Module) -> dict[str, list[nn.Module]]:
        names = dict.fromkeys(re.split(r"\.\d+\.", layer.name)[0] for layer in self.layers(module))
        return {name: list(module.get_submodule(name).children()) for name in names}


def replaceable(layer: SelfAttention, processor: object, take_over: Sequence[str]) -> bool:
    """Tell whether a method may take the place of an attention processor: of a plain one, or of one that is named."""
    name = type(processor).__name__
    if layer.knows(processor) or name not in take_over:
        return layer.knows(processor)
    if obstacle := layer.obstacle_to(processor):
        raise ElfattError(f"take_over={name!r} is not accepted; {obstacle}. Leave it out: its layers are left alone.")
    return True


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside the wrappers of `torch.compile`, of PEFT, of parallel training, or of a user."""
    while True:
        if hasattr(module, "_orig_mod"):
            module = module._orig_mod  # type: ignore[assignment]
        elif isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            module = module.module
        elif hasattr(module, "get_base_model") and hasattr(module, "peft_config"):
            module = module.get_base_model()  # type: ignore[operator]
        elif len(found := models_within(module)) == 1 and found[0][0]:  # a wrapper of one model
            module = found[0][1]
        else:
            return module


def models_within(module: nn.Module, name: str = "") -> list[tuple[str, nn.Module]]:
    if isinstance(module, ModelMixin):
        return [(name, module)]
    parts = ((f"{name}.{part}" if name else part, held) for part, held in module.named_children())
    return [found for part, held in parts for found in models_within(held, part)]


def copy_structure(module: Module) -> Module:
    """Copy a module without its weights: both have the same parameters and buffers."""
    return copy.deepcopy(module, {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())})


def some_timestep(device: torch.device, unit: int | None = None, dtype: torch.dtype | None = torch.long) -> Tensor:
    timesteps = torch.arange(999, -1, -1, device=device, dtype=dtype)
    if unit is not None:
        timesteps = (timesteps + 1).float() / 1000 if unit == FRACTION else (999 - timesteps).float() / 1000
    return timesteps[STEP]
