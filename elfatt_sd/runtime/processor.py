"""The attention processor: one page that shows the method.

    tokens -> merge -> order -> q, k, v -> attention -> output projection -> order back -> unmerge

The processor itself holds nothing: diffusers rebuilds processors without arguments when an IP-Adapter is loaded, and
`torch.compile` specialises on every processor object. What stays the same from call to call is kept on the attention
module (`PatchedLayer`); what belongs to one call of the denoiser is kept by thread (`Call`, `LayerCall`), so that
threads can share a UNet.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.attention_processor import AttnProcessor2_0, FusedAttnProcessor2_0
from torch import Tensor

from elfatt_sd.attention.ordering import order_merged
from elfatt_sd.devices import is_exporting, refuse_tracing
from elfatt_sd.errors import ElfattError
from elfatt_sd.families.base import Projections, SelfAttention, replaceable
from elfatt_sd.methods import Grid
from elfatt_sd.phases import DENSE, Phase
from elfatt_sd.runtime.call import STATE, Call, Denoiser, LayerCall, attend, recomputed_part, rounded
from elfatt_sd.runtime.joint_processor import JointProcessor, joint_processor_for
from elfatt_sd.runtime.surroundings import device_of_weights, skipped_like, stand_in

_BYPASSED = (
    "it is called without the hooks of its patched model, by which the step is known; call the model itself, not its "
    "forward or a part of it, and compile the model or its blocks"
)
_DEFAULT: Any = AttnProcessor2_0
_OVERRIDDEN = ("get_processor", "set_processor")  # of a patched attention module: they speak of the original


class PatchedLayer:
    """A patched layer: what stays the same from call to call.

    While a layer is patched, its `get_processor` and `set_processor` speak of the original: what diffusers, PEFT or a
    user saves, inspects, fuses, slices or resets works as without the patch.
    """

    def __init__(
        self,
        layer: SelfAttention,
        index: int,
        original: Callable[..., Tensor],
        denoiser: Denoiser,
        taken_over: tuple[str, ...] = (),
    ) -> None:
        self.layer = layer
        self.index = index
        self.original = original
        self.denoiser = denoiser
        self.taken_over = taken_over
        self.config = denoiser.config.for_layer(layer.name)  # with the layer's own phases
        self.latest: LayerCall | None = None  # of any thread; compiled code reads it, as it cannot ask for its thread
        self.parts: list[torch.nn.Module] = list(layer.attention.modules())  # and those around it, see `device_of`

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "latest": None}

    @property
    def original(self) -> Callable[..., Tensor]:
        """The processor to call in exact phases and to put back."""
        return self._original

    @original.setter
    def original(self, processor: Callable[..., Tensor]) -> None:
        self._original = processor
        self.accepted = accepted_names(processor)
        # The layer's own flag outlives `unfuse_qkv_projections`.
        self.fused = isinstance(processor, FusedAttnProcessor2_0)

    def install(self) -> None:
        """Put our processor into the layer."""
        attention: Any = self.layer.attention
        setattr(attention, STATE, self)
        self._put(self._ours())
        for name in _OVERRIDDEN:
            setattr(attention, name, getattr(self, name))

    def remove(self) -> None:
        """Put the original processor back, unless another one took the place of ours."""
        attention: Any = self.layer.attention
        for name in _OVERRIDDEN:
            delattr(attention, name)
        if self.installed:
            self._put(self.original)
        delattr(attention, STATE)

    def _ours(self) -> Any:
        if self.layer.joint:
            return joint_processor_for(self.original)
        return processor_for(self.accepted)

    def _put(self, processor: Any) -> None:
        """Set the layer's processor; an original that is a module stays a child, whose weights are moved and saved."""
        attention: Any = self.layer.attention
        attention._modules.pop("processor", None)
        type(attention).set_processor(attention, processor)
        if isinstance(self.original, torch.nn.Module) and processor is not self.original:
            attention._modules["processor"] = self.original

    @property
    def installed(self) -> bool:
        return isinstance(self.layer.attention.processor, OURS)

    def get_processor(self, return_deprecated_lora: bool = False) -> Any:
        return self.original if self.installed else self.layer.attention.processor

    def set_processor(self, processor: Any) -> None:
        """Replace the original; one that is not plain attention takes our place, until a plain one is back."""
        if isinstance(processor, OURS):
            return
        ours = replaceable(self.layer, processor, self.taken_over)
        self.original = processor
        self._put(self._ours() if ours else processor)

    @property
    def state(self) -> LayerCall | None:
        """The layer's state in the call that goes on; None outside of any call."""
        if torch.compiler.is_compiling():
            if is_exporting():
                refuse_tracing(torch.device("cpu"))
            return self.latest
        call = self.denoiser.call or self.denoiser.repeated
        if call is not None:
            return call.states.get(self.index)
        refuse_tracing(device_of_weights(self.parts, torch.device("cpu")))  # a block alone
        if recomputed_part() is not None:
            raise ElfattError(
                f"a checkpoint computes {self.layer.name} once more, and its call of the model is not known; "
                "checkpoint whole transformer blocks, as enable_gradient_checkpointing does, and leave what they are "
                "given where it is: a copy, as save_on_cpu makes one, tells nothing."
            )
        if torch._C._current_graph_task_id() == -1:  # no checkpoint within one that computes without gradients
            self.tell_of_bypass()
        return None

    @torch.compiler.disable(reason=_BYPASSED)  # type: ignore[untyped-decorator, no-untyped-call]
    def tell_of_bypass(self) -> None:
        if not self.denoiser.bypassed:
            self.denoiser.bypassed = True
            warnings.warn(f"elfatt-sd: {self.layer.name} stays exact: {_BYPASSED}.", stacklevel=2)

    def keep_block_input(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        """Forward pre-hook of the normalisation before the layer: keep the block's input until the matching is made."""
        state = self.state
        if state is not None and state.phase.matches:
            state.block_input = inputs[0]

    def before_transformer(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the module around the layer that is given the grid."""
        self.measure_grid(args[0] if args else kwargs["hidden_states"])

    def measure_grid(self, hidden_states: Tensor) -> None:
        """Take the grid from what arrives, `[batch, channels, rows, columns]`, where it was thought to be another."""
        if torch.compiler.is_compiling() or hidden_states.ndim != 4:
            return
        state, grid = self.state, Grid.image(*map(int, hidden_states.shape[-2:]))
        if state is not None and state.grid != grid:
            state.grid = grid
            state.begin(state.phase, state.call.step, hidden_states.device)
            self.denoiser.grids[self.index, state.call.given.grid] = state.grid


class ElfattProcessor:
    """Self-attention by the phase of the denoising run; eq. lepe1sd and lepe2sd of the paper for `elfatt`."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        patched: PatchedLayer | None = getattr(attn, STATE, None)
        if patched is None:  # a layer that is not patched: what diffusers does by default
            return _DEFAULT()(attn, hidden_states, encoder_hidden_states, attention_mask, temb)  # type: ignore[no-any-return]
        patched.measure_grid(hidden_states)
        state = patched.state
        if state is None:  # outside of any call of the denoiser
            state = LayerCall(patched, Call(patched.denoiser.config))
        phase = state.phase
        projections = state.layer.projections
        obstacle = stand_in(attn, not phase.dense) or projections.obstacle(
            state.grid, hidden_states, encoder_hidden_states, attention_mask
        )
        if obstacle or (phase.exact and state.call.config.attention_backend == "auto"):
            state.outcome = obstacle
            return state.exact(attn, hidden_states, encoder_hidden_states, attention_mask, temb=temb, **others)
        given = projections(attn, hidden_states, temb, state.fused)
        try:
            if phase.residual_steps > 1 and not phase.dense:
                output = state.correct(
                    lambda: approximate(given, state, phase, given.tokens),
                    lambda rows: approximate(given, state, DENSE[phase.attention_dtype], given.tokens[rows]),
                )
            else:
                output = approximate(given, state, phase, given.tokens)
        finally:  # also where memory ran out
            state.block_input = state.candidates = None
            state.calls += 1
        state.outcome = "done"
        return given.close(output)


OURS = (ElfattProcessor, JointProcessor)


def accepted_names(processor: Callable[..., Tensor]) -> frozenset[str]:
    return frozenset(inspect.signature(processor.__call__).parameters)  # type: ignore[operator]


def processor_for(accepted: frozenset[str]) -> ElfattProcessor:
    return _class_for(accepted)()


@functools.cache
def _class_for(accepted: frozenset[str]) -> type[ElfattProcessor]:
    own = dict(inspect.signature(ElfattProcessor.__call__).parameters)
    more = sorted(accepted - own.keys() - {"args", "kwargs"})
    if not more:
        skipped_like(ElfattProcessor, AttnProcessor2_0)
        return ElfattProcessor

    class ElfattProcessorWithNames(ElfattProcessor):
        def __call__(self, *args: Any, **named: Any) -> Tensor:
            return ElfattProcessor.__call__(self, *args, **named)

        def __reduce__(self) -> tuple[Any, ...]:
            return processor_for, (accepted,)

    keywords = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in more]
    parameters = [parameter for name, parameter in own.items() if name != "others"]
    ElfattProcessorWithNames.__call__.__signature__ = inspect.Signature([*parameters, *keywords])  # type: ignore[attr-defined]
    ElfattProcessorWithNames.__name__ = ElfattProcessor.__name__
    skipped_like(ElfattProcessorWithNames, AttnProcessor2_0)
    return ElfattProcessorWithNames


class LayerInCall:
    """A layer in one call, as an attention sees it; see `methods.Layer`."""

    def __init__(self, given: Projections, state: LayerCall, tokens: Tensor, phase: Phase) -> None:
        config = state.call.config
        self.kernel: dict[str, Any] = {"fp32_logits": config.fp32_logits, "backend": config.attention_backend}
        self.context = None
        self.heads: tuple[int, ...] = ()  # and their size, once queries are projected
        self.dtype = tokens.dtype
        self._given = given
        self._state = state
        self._tokens = tokens
        self._phase = phase

    def project(self, tokens: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (rounded(each, self._phase) for each in self._given.project(tokens, keys))
        self.heads, self.dtype = tuple(q.shape[2:]), q.dtype
        return q, k, v

    def queries(self, tokens: Tensor) -> Tensor:
        q = rounded(self._given.queries(tokens), self._phase)
        self.heads, self.dtype = tuple(q.shape[2:]), q.dtype
        return q

    def merged(self, ratio: float) -> Tensor:
        matching = self._state.matching(self._tokens, ratio)
        return self._tokens if matching is None else matching.merge(self._tokens)


def approximate(given: Projections, state: LayerCall, phase: Phase, tokens: Tensor) -> Tensor:
    """Merge, order, attend, project, and put every token back in its place; `[batch, tokens, channels]`."""
    prepared = None if phase.dense else state.prepared
    order = None if prepared is None else prepared.order_for(state.call.config.attention_backend)
    matching = state.matching(tokens, phase.merge.ratio)
    if matching is not None:
        if prepared is not None and prepared.sorts_merged:
            matching = matching.reordered(order_merged(order, matching.positions))
        merged = matching.merge(tokens)
    else:
        merged = tokens if order is None else tokens.index_select(1, order)
    mixed = attend(phase.attention, LayerInCall(given, state, tokens, phase), merged, prepared)
    output = given.output(mixed if phase.attention_dtype is None else mixed.to(tokens.dtype))
    if matching is not None:
        return matching.unmerge(output)
    return output if order is None else output.index_select(1, prepared.inverse)  # type: ignore[union-attr, arg-type]
