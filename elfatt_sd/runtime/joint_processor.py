"""The attention processor of layers that join image and text: the original one, with approximate image attention.

q, k, v of the whole sequence -> [text queries: exact] + [image: order -> attention with text as keys -> order back]
"""

from __future__ import annotations

import functools
import inspect
import operator
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from elfatt_sd.attention.joint import Keys, exact_attention
from elfatt_sd.attention.merging import Matching
from elfatt_sd.attention.ordering import order_merged
from elfatt_sd.devices import standard_normal
from elfatt_sd.families.joint import exact_function, with_attention
from elfatt_sd.runtime.call import LayerCall, attend, rounded
from elfatt_sd.runtime.layer import STATE, Processor, called_like, stand_in
from elfatt_sd.runtime.processor import LayerInCall

Exact = Callable[..., Tensor]
_FORWARDED = ("_attention_backend", "_parallel_config")  # attributes that diffusers sets on processors


class _Current:
    """The layer that is being called, and how its tokens are merged."""

    state: LayerCall | None = None
    matching: Matching | None = None


class _CurrentOfThread(_Current, threading.local):
    pass


_eager, _compiled = _CurrentOfThread(), _Current()  # compiled code cannot ask for its thread


class JointProcessor(Processor):
    """Calls a layer's original processor, in approximated steps with another attention function."""

    def __init__(self, original: Any) -> None:
        self.original = original
        kind: Any = type(original)
        self._approximating = with_attention(kind, _attend)

    def __reduce__(self) -> tuple[Any, ...]:
        return joint_processor_for, (self.original,)

    def __call__(self, attn: Any, *args: Any, **kwargs: Any) -> Any:
        state: LayerCall | None = attn.elfatt_state.state if hasattr(attn, STATE) else None
        if state is None or state.phase.exact:
            return self.original(attn, *args, **kwargs)
        if obstacle := stand_in(attn, state.phase.merge.ratio > 0):
            state.outcome = obstacle
            return self.original(attn, *args, **kwargs)
        try:
            return self._approximated(state, attn, args, kwargs)
        finally:
            state.block_input = state.candidates = None
            state.calls += 1

    def _approximated(self, state: LayerCall, attn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        matching = None
        if state.phase.merge.ratio:
            tokens = args[0] if args else kwargs["hidden_states"]
            matching = state.matching(tokens, state.phase.merge.ratio)
        if matching is None:
            return self._call(state, None, attn, args, kwargs)
        prepared = state.prepared
        if prepared is not None and prepared.sorts_merged:  # in block order
            matching = matching.reordered(order_merged(prepared.order, matching.positions))
        merged = matching.merge(tokens)
        given = ((merged, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": merged})
        approximated = functools.partial(self._call, state, matching, attn, *given)
        if state.phase.residual_steps == 1:
            output = approximated()
            return (matching.unmerge(output[0]), *output[1:]) if isinstance(output, tuple) else matching.unmerge(output)
        # The error of merging and attention together is taken off: merged tokens change from step to step.
        exact: Any = functools.partial(self.original, attn, *args, **kwargs)
        text: list[Any] = []

        def image_of(output: Any, *, is_exact: bool = False) -> Tensor:
            image, *others = output if isinstance(output, tuple) else (output,)
            text[:] = others if is_exact else text or others
            return image  # type: ignore[no-any-return]

        image = state.correct(
            lambda: matching.unmerge(image_of(approximated())), lambda rows: image_of(exact(), is_exact=True)[rows]
        )
        state.outcome = state.outcome or "done"
        return (image, *text) if text else image

    def _call(
        self, state: LayerCall, matching: Matching | None, attn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        current = _compiled if torch.compiler.is_compiling() else _eager
        current.state, current.matching = state, matching
        try:
            return self._approximating(self.original, attn, *args, **kwargs)
        finally:
            current.state = current.matching = None


def joint_processor_for(original: Any) -> JointProcessor:
    kind: Any = type(original)
    made: JointProcessor = _class_for(kind, kind.__call__)(original)
    return made


@functools.cache
def _class_for(kind: Any, call: Callable[..., Any]) -> Any:
    """Return the class of processors that stand in for those of a kind; its call has their signature."""
    made = called_like(JointProcessor, kind, inspect.signature(call))
    for name in filter(functools.partial(hasattr, kind), _FORWARDED):
        write = functools.partial(lambda name, own, value: setattr(own.original, name, value), name)
        setattr(made, name, property(operator.attrgetter(f"original.{name}"), write))
    return made


def _attend(exact: Exact, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
    """Stand in for the attention function of a processor; see `families.joint.with_attention`."""
    current = _compiled if torch.compiler.is_compiling() else _eager
    state, matching = current.state, current.matching
    assert state is not None
    if args:
        options = {"attn_mask": args[0], **options}
    mask = options.pop("attn_mask", None)
    tokens = state.grid.tokens if matching is None else matching.positions.shape[1]
    image = slice(state.call.given.before, state.call.given.before + tokens)
    obstacle = _obstacle(state, query, key, image, mask, options)
    if obstacle:  # of an IP-Adapter's image, for instance, after the layer's own attention
        state.outcome = state.outcome or obstacle
        return exact(query, key, value, attn_mask=mask, **options)
    joint = _Joint(state, exact, (query, key, value), mask, options, image, matching)
    if state.phase.residual_steps > 1 and matching is None:
        mixed = state.correct(joint.approximated, functools.partial(joint.exact, image))
    else:
        mixed = joint.approximated()
    state.outcome = "done"
    before, after = ([joint.exact(part)] if part.stop > part.start else [] for part in _around(image, query.shape[1]))
    return torch.cat([*before, mixed, *after], 1) if before or after else mixed


def _around(image: slice, tokens: int) -> tuple[slice, slice]:
    return slice(0, image.start), slice(image.stop, tokens)


def _obstacle(
    state: LayerCall, query: Tensor, key: Tensor, image: slice, mask: Tensor | None, options: dict[str, Any]
) -> str:
    if query.shape[1] != key.shape[1]:
        return "it was given other tokens to attend to"
    if query.shape[1] < image.stop:
        return f"it was given {query.shape[1]} tokens in place of {state.grid} and {image.start} of text"
    if query.shape[1] > image.stop - image.start and not state.phase.attention.joint:  # of given frames, for instance
        return f"it was given tokens besides those of {state.grid}, and {state.phase.attention.name!r} sees none"
    if options.get("is_causal") or options.get("scale") is not None or options.get("enable_gqa"):
        return "its attention is causal, or has a scale or groups of heads of its own"
    if mask is not None:
        per_query = mask.ndim > 1 and mask.shape[-2] > 1 and mask.shape != (len(query), key.shape[1])
        masks_text = state.layer.masks_text  # type: ignore[attr-defined]
        of_keys = masks_text or (mask.dtype == torch.bool and not per_query)
        if not of_keys or (mask.ndim == 4 and mask.shape[1] != 1):
            return "it was given a mask that is not of keys alone"
    return ""


class Projected:
    """Queries, keys and values that are there already, where a layer would project tokens to them."""

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = tensors

    def project(self, tokens: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._tensors
        return (q, k, v) if keys is None else (q, k.index_select(1, keys), v.index_select(1, keys))

    def queries(self, tokens: Tensor) -> Tensor:
        return self._tensors[0]


class _Joint:
    """One call of an attention function: q, k, v of a whole sequence, `[batch, tokens, heads, size]`."""

    def __init__(
        self,
        state: LayerCall,
        exact: Exact,
        tensors: tuple[Tensor, Tensor, Tensor],
        mask: Tensor | None,
        options: dict[str, Any],
        image: slice,
        matching: Matching | None,
    ) -> None:
        self._state = state
        self._exact = exact
        self._dtype = tensors[0].dtype
        q, k, v = (rounded(each.to(tensors[2].dtype), state.phase) for each in tensors)  # autocast widens two
        self._tensors = q, k, v
        self._mask = rounded(mask, state.phase) if mask is not None and mask.is_floating_point() else mask
        self._options = options
        self._image = image
        self._matching = matching

    def exact(self, part: slice, rows: slice | None = None) -> Tensor:
        rows = rows or slice(None)  # PyTorch 2.11 compiles no slice that is a constant
        q, k, v = (x[rows] for x in self._tensors)
        mask, image = self._mask, self._image
        if self._matching is not None:
            merged = Keys(k[:, image], v[:, image], self._matching.sizes.log())
            return exact_attention(q[:, part], [merged, *filter(None, [self._context()])]).to(self._dtype)
        if mask is not None and mask.ndim > 1 and len(mask) > 1:
            mask = mask[rows]
        if mask is not None and mask.ndim > 2 and mask.shape[-2] > 1:
            mask = mask[..., part, :]
        return self._exact(q[:, part], k, v, attn_mask=mask, **self._options).to(self._dtype)

    def approximated(self) -> Tensor:
        if self._state.phase.dense:
            return self.exact(self._image)
        state, prepared, image, matching = self._state, self._state.prepared, self._image, self._matching
        stands_for = 1.0 if matching is None else state.grid.tokens / (image.stop - image.start)
        q, k, v = self._tensors
        backend = state.call.config.attention_backend
        order = None if prepared is None or matching is not None else prepared.order_for(backend)
        own = [x[:, image] if order is None else x[:, image].index_select(1, order) for x in (q, k, v)]
        context = self._context(1 / stands_for)
        if state.call.config.fp32_logits:
            own = [x.float() for x in own]
            context = context and context._replace(k=context.k.float(), v=context.v.float())
        tokens = own[0].flatten(2)
        layer = LayerInCall(Projected(*own), state, tokens, state.phase, context)
        mixed = attend(state.phase.attention, layer, tokens, prepared).to(self._dtype)
        return mixed if order is None else mixed.index_select(1, prepared.inverse)  # type: ignore[union-attr, arg-type]

    def _context(self, stands_for: float = 1.0) -> Keys | None:
        (_, k, v), image = self._tensors, self._image
        parts = [part for part in _around(image, k.shape[1]) if part.stop > part.start]
        if not parts:
            return None
        mask = self._mask
        if mask is not None:
            if mask.ndim > 2:  # a row for all queries, or one for each
                mask = mask.flatten(1, -2)[:, image.start if mask.shape[-2] > 1 else 0]
            if mask.dtype != torch.bool:  # what is added to all logits alike changes nothing
                mask = mask - mask[:, image.start : image.start + 1]
            mask = torch.cat([mask[:, part] for part in parts], 1).expand(k.shape[0], -1)
        keys, values = (torch.cat([x[:, part] for part in parts], 1) for x in (k, v))
        return Keys(keys, values, mask, stands_for)


def attention_alone(state: LayerCall, sample: Tensor) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return a layer's exact attention and its approximation, to be timed; projections are the same with both."""
    layer, attention = state.layer, state.layer.attention
    tokens, heads = layer.text + state.grid.tokens, int(attention.heads)
    size = (len(sample), tokens, heads, int(attention.inner_dim) // heads)
    same = standard_normal(size, torch.Generator().manual_seed(0)).to(sample)
    exact = exact_function(type(state.patched.original))
    joint = _Joint(state, exact, (same, same, same), None, {}, slice(layer.text, tokens), None)

    def approximated() -> None:
        if layer.text:
            joint.exact(slice(layer.text))
        joint.approximated()

    return lambda: exact(same, same, same), approximated
