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
from typing import Any

from diffusers.models.attention_processor import AttnProcessor2_0
from torch import Tensor

from elfatt_sd.attention.joint import Keys
from elfatt_sd.attention.ordering import order_merged
from elfatt_sd.families.base import PlainProjections
from elfatt_sd.phases import DENSE, Phase
from elfatt_sd.runtime.call import Call, LayerCall, attend, rounded
from elfatt_sd.runtime.layer import STATE, PatchedLayer, Processor, called_like, skipped_like, stand_in

_DEFAULT: Any = AttnProcessor2_0


class ElfattProcessor(Processor):
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
        state = patched.state
        if state is None:  # outside of any call of the denoiser
            state = LayerCall(patched, Call(patched.patch.config))
        phase = state.phase
        projections = state.layer.projections
        obstacle = stand_in(attn, not phase.dense) or projections.obstacle(
            state.grid, hidden_states, encoder_hidden_states, attention_mask
        )
        if obstacle or (phase.exact and state.call.config.attention_backend == "auto"):
            state.outcome = obstacle
            return state.exact(attn, hidden_states, encoder_hidden_states, attention_mask, temb=temb, **others)
        given = projections(attn, hidden_states, temb, patched.fused)
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


@functools.cache
def processor_for(accepted: frozenset[str]) -> type[ElfattProcessor]:
    """Return the class of processors that take arguments of these names, which diffusers looks up in its signature."""
    own = dict(inspect.signature(ElfattProcessor.__call__).parameters)
    more = sorted(accepted - own.keys() - {"args", "kwargs"})
    if not more:
        skipped_like(ElfattProcessor, AttnProcessor2_0)
        return ElfattProcessor
    keywords = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in more]
    parameters = [parameter for name, parameter in own.items() if name != "others"]
    made = called_like(ElfattProcessor, AttnProcessor2_0, inspect.Signature([*parameters, *keywords]))
    made.__reduce__ = lambda self: (_rebuilt, (accepted,))
    return made  # type: ignore[no-any-return]


def _rebuilt(accepted: frozenset[str]) -> ElfattProcessor:
    return processor_for(accepted)()


class LayerInCall:
    """A layer in one call, as an attention sees it; see `methods.Layer`."""

    def __init__(self, given: Any, state: LayerCall, tokens: Tensor, phase: Phase, context: Keys | None = None) -> None:
        config = state.call.config
        self.kernel: dict[str, Any] = {"fp32_logits": config.fp32_logits, "backend": config.attention_backend}
        self.context = context
        self.heads: tuple[int, ...] = ()  # and their size, once queries are projected
        self.dtype = tokens.dtype
        self._given, self._state, self._tokens, self._phase = given, state, tokens, phase

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


def approximate(given: PlainProjections, state: LayerCall, phase: Phase, tokens: Tensor) -> Tensor:
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
