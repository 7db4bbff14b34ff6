"""The attention processor: one page that shows the method.

    tokens -> merge -> order -> q, k, v -> attention -> output projection -> order back -> unmerge

The processor itself holds nothing: diffusers rebuilds processors without arguments when an IP-Adapter is loaded, and
`torch.compile` specialises on every processor object. What stays the same from call to call is kept on the attention
module (`PatchedLayer`); what belongs to one call of the denoiser is kept by thread (`Call`, `LayerState`), so that
threads can share a UNet.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.attention_processor import AttnProcessor2_0, FusedAttnProcessor2_0
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from elfatt_sd.config import EXACT, ElfattError, PatchConfig, Phase
from elfatt_sd.families.base import Projections, SelfAttention, is_plain
from elfatt_sd.merging import Candidates, Matching, find_candidates, match_candidates
from elfatt_sd.methods import Draws, Grid, Prepared, is_own
from elfatt_sd.methods.conformance import check_result, raises_in_one_line
from elfatt_sd.ordering import order_merged
from elfatt_sd.schedule import Position, Run

_NO_GRID = Grid(0, 0, 0)
STATE = "elfatt_state"  # attribute of a patched attention module
KEPT_CALLS = 32  # of one step, that keep something for the next steps; it bounds the memory of calls without a schedule
_DEFAULT: Any = AttnProcessor2_0
_OVERRIDDEN = ("get_processor", "set_processor")  # of a patched attention module: they speak of the original


class Call:
    """One call of a denoiser: what its layers share.

    Attributes:
        config: the method.
        phase: of the call's step.
        step: of the call, from which random draws are made.
        sample_size: height and width of the denoiser's input.
        memory: what the run keeps.
        matchings: of this call, and of its like in earlier steps.
        scheduled: whether the call is one of a run over a schedule.
        shares: whether a difference measured in this call is of use in a later step.
        last: whether the run ends with this step.
        states: of the patched layers, by the layer's index.
        entered: whether the denoiser has come to its first convolution.
    """

    def __init__(self, config: PatchConfig, phase: Phase = EXACT, step: int = 0) -> None:
        self.config = config
        self.phase = phase
        self.step = step
        self.sample_size = (0, 0)
        self.memory = Memory()
        self.matchings: dict[object, Matching | None] = {}
        self.scheduled = self.shares = self.last = self.entered = False
        self.states: dict[int, LayerState] = {}

    def restart(self) -> None:
        """Begin anew, when the whole call is computed once more."""
        self.entered = False
        for state in self.states.values():
            state.calls = 0


class Memory:
    """What one denoiser keeps from step to step of a run."""

    def __init__(self) -> None:
        self.matchings = Shelf()
        self.residuals = Shelf()  # by the layer's index
        self._step = -1
        self._calls: Counter[tuple[int, ...]] = Counter()  # of this step, by the shape of their input

    def place(self, step: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the place of a call among those of its step, and its shape."""
        if step != self._step:
            self._calls.clear()
        self._step = step
        place = self._calls[shape], *shape
        self._calls[shape] += 1
        return place

    def repeat_step(self) -> None:
        """Let the next call stand for the first of its step, whatever was called before it."""
        self._step = -1


class Shelf:
    """What the calls of a group of steps keep for each other, by their place in the step."""

    def __init__(self) -> None:
        self._group: object = None
        self._kept: dict[tuple[int, ...], dict[Any, Any]] = {}

    def take(self, group: object, place: tuple[int, ...], keep: bool) -> dict[Any, Any]:
        """Return what calls at a place have kept, to be added to; a new group of steps begins with nothing."""
        if group != self._group:
            self._kept.clear()
        self._group = group
        return self._kept.setdefault(place, {}) if keep else {}


class Denoiser:
    """What the patched layers of one UNet or ControlNet share.

    Args:
        config: the method.
        pays: tells whether a phase makes a layer faster, for an input of the denoiser; by default every one counts.
    """

    def __init__(self, config: PatchConfig, pays: Callable[[LayerState, Phase, Tensor], bool] | None = None) -> None:
        self.config = config
        self.pays = pays
        self.layers: list[PatchedLayer] = []
        self.grids: dict[tuple[int, int, int], Grid] = {}  # measured, by layer and size of the input
        self.latest: Call | None = None  # of any thread
        self._live: dict[int, Call] = {}  # by thread
        self._inputs: dict[tuple[int, int], tuple[Any, Any]] = {}  # of what a checkpoint may compute once more

    def __getstate__(self) -> dict[str, Any]:
        """Copy without the calls of this object's threads."""
        return {**self.__dict__, "latest": None, "_live": {}, "_inputs": {}}

    @property
    def call(self) -> Call | None:
        """The call that goes on in this thread; None between calls."""
        return self._live.get(threading.get_ident())

    @property
    def phase(self) -> Phase:
        """The phase of the call that goes on in this thread."""
        call = self.call
        return EXACT if call is None else call.phase

    def begin(self, position: Position, run: Run, sample: Tensor) -> None:
        """Prepare the layers for a call: phase, grids, and what is drawn at random.

        A step may take several calls: with the prompt and without, or one for each view of a panorama. What a call
        keeps is for the calls of later steps that have the same place among those of their step, and the same shape.

        Args:
            position: of the call in the schedule.
            run: the run that it belongs to; nothing is carried over from another one.
            sample: the denoiser's input, `[batch, ..., height, width]`.
        """
        config, step = self.config, position.step
        call = Call(config, config.phase_at(step, position.steps), step)
        phase, shape = call.phase, tuple(map(int, sample.shape))
        call.memory = memory = run.kept.setdefault(id(self), call.memory)
        place = memory.place(step, shape)
        call.scheduled = position.scheduled
        kept = position.scheduled and place[0] < KEPT_CALLS
        call.matchings = memory.matchings.take(step // config.reuse_steps, place, kept and config.reuse_steps > 1)
        group = step // phase.residual_steps, phase
        residuals = memory.residuals.take(group, place, kept and phase.residual_steps > 1)
        call.shares = kept and config.shares_difference(step, position.steps)
        call.last = 1 < position.steps == step + 1
        height, width = call.sample_size = shape[-2], shape[-1]
        for layer in self.layers:
            grid = self.grids.get((layer.index, height, width)) or layer.layer.grid(height, width)
            state = LayerState(layer, call, grid)
            own = phase
            if self.pays is not None and not own.exact and not self.pays(state, own, sample):
                own = EXACT
            state.begin(own, step, sample.device)
            state.residuals = residuals.setdefault(layer.index, {})
            call.states[layer.index] = state
        self.enter(call)

    def enter(self, call: Call) -> None:
        """Let a call be the one that goes on in this thread."""
        self._live[threading.get_ident()] = self.latest = call
        for layer in self.layers:
            layer.latest = call.states[layer.index]

    def end(self) -> Call | None:
        """End the call that goes on in this thread, and return it."""
        return self._live.pop(threading.get_ident(), None)

    @property
    def threads(self) -> int:
        """Number of threads that are in a call."""
        return len(self._live)

    def remember(self, tensor: Tensor, what: Any) -> None:
        """Keep `what` as long as the memory of a tensor is in use, for `recall`."""
        self._inputs = {key: kept for key, kept in self._inputs.items() if not kept[0].expired()}
        self._inputs[_memory_of(tensor)] = StorageWeakRef(tensor.untyped_storage()), what  # type: ignore[no-untyped-call]

    def recall(self, tensor: Tensor) -> Any:
        """Return what was remembered of a tensor, of which a checkpoint hands over a view; None if nothing was."""
        kept = self._inputs.get(_memory_of(tensor))
        return None if kept is None or kept[0].expired() else kept[1]


def _memory_of(tensor: Tensor) -> tuple[int, int]:
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset())


class PatchedLayer:
    """A patched layer: what stays the same from call to call.

    While a layer is patched, its `get_processor` and `set_processor` speak of the original: what diffusers, PEFT or a
    user saves, inspects, fuses, slices or resets works as without the patch.

    Args:
        layer: where it is.
        index: its number among all layers of the denoiser that have self-attention.
        original: the processor to call in exact phases and to put back.
        denoiser: what it shares with the other layers.
        taken_over: names of processors, not plain attention, whose layers are patched nevertheless.
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
        self.latest: LayerState | None = None  # of any thread; compiled code reads it, as it cannot ask for its thread
        self.recomputed: LayerState | None = None  # of a call that a checkpoint computes once more

    def __getstate__(self) -> dict[str, Any]:
        """Copy without the states of this object's calls."""
        return {**self.__dict__, "latest": None, "recomputed": None}

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
        self._put(processor_for(self.accepted)())
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

    def _put(self, processor: Any) -> None:
        """Set the layer's processor; an original that is a module stays a child, whose weights are moved and saved."""
        attention: Any = self.layer.attention
        attention._modules.pop("processor", None)
        type(attention).set_processor(attention, processor)
        if isinstance(self.original, torch.nn.Module) and processor is not self.original:
            attention._modules["processor"] = self.original

    @property
    def installed(self) -> bool:
        """Whether our processor is in the layer, and nothing has taken its place."""
        return isinstance(self.layer.attention.processor, ElfattProcessor)

    def get_processor(self, return_deprecated_lora: bool = False) -> Any:
        """Return the original processor, or the one that has displaced ours."""
        return self.original if self.installed else self.layer.attention.processor

    def set_processor(self, processor: Any) -> None:
        """Replace the original; one that is not plain attention takes our place, until a plain one is back."""
        if isinstance(processor, ElfattProcessor):
            return
        self.original = processor
        ours = is_plain(processor) or type(processor).__name__ in self.taken_over
        self._put(processor_for(self.accepted)() if ours else processor)

    @property
    def state(self) -> LayerState | None:
        """The layer's state in the call that goes on; None outside of any call."""
        if torch.compiler.is_compiling():
            return self.latest
        call = self.denoiser.call
        if call is not None:
            return call.states.get(self.index)
        if is_recomputing() and self.recomputed is None:
            raise ElfattError(
                f"a checkpoint computes {self.layer.name} once more, and its call of the model is not known; "
                "checkpoint whole transformer blocks, as enable_gradient_checkpointing does."
            )
        return self.recomputed

    def remember_block_input(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        """Forward pre-hook of the normalisation before the layer: keep the block's input until the matching is made.

        A checkpoint that computes the block once more hands over the input that it kept: by it, the call is known.
        """
        block_input = inputs[0]
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            if self.denoiser.call is None and is_recomputing():
                self.recomputed = self.denoiser.recall(block_input)
            elif self.state is not None:
                self.denoiser.remember(block_input, self.state)
        state = self.state
        if state is not None and state.phase.matches:
            state.block_input = block_input

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
            self.denoiser.grids[self.index, *state.call.sample_size] = state.grid


class LayerState:
    """What a patched layer knows in one call of the denoiser.

    Args:
        patched: the layer.
        call: of the denoiser.
        grid: of its tokens.
    """

    def __init__(self, patched: PatchedLayer, call: Call, grid: Grid = _NO_GRID) -> None:
        self.patched = patched
        self.call = call
        self.grid = grid
        self.phase: Phase = EXACT
        self.block_input: Tensor | None = None  # of the transformer block, before its normalisation: ToMe's metric
        self.choice: Tensor | None = None  # of the merge destinations
        self.candidates: Candidates | None = None  # of this call
        self.prepared: Prepared | None = None  # by the phase's attention
        self.calls = 0  # of the layer in this call of the denoiser: several, where that splits its input
        self.residuals: dict[int, Tensor] = {}  # of each: exact minus approximated output; see `residual_steps`
        self.added: dict[int, Tensor | None] = {}  # of each: the difference that was added, None where it was measured
        self.outcome = ""  # why the layer was not approximated in this call; `done` if it was

    @property
    def layer(self) -> SelfAttention:
        """Where the layer is."""
        return self.patched.layer

    @property
    def original(self) -> Callable[..., Tensor]:
        """The processor that is called in exact phases."""
        return self.patched.original

    @property
    def index(self) -> int:
        """Its number among all layers of the denoiser that have self-attention."""
        return self.patched.index

    @property
    def fused(self) -> bool:
        """Whether its projections are fused."""
        return self.patched.fused

    def begin(self, phase: Phase, step: int, device: torch.device) -> None:
        """Set the phase, and draw the merge destinations and what its attention prepares for this step on the grid."""
        config = self.call.config
        self.phase = phase
        self.block_input = self.choice = self.candidates = self.prepared = None
        self.calls, self.added = 0, {}
        if phase.exact:
            return
        if phase.matches and config.use_rand:
            draws = self._draws(step, max(config.reuse_steps, phase.residual_steps), device)
            chosen = draws.uniform("destinations", phase.merge.destinations(self.grid)) * phase.merge.stride**2
            self.choice = draws.upload(chosen.long())
        draws = self._draws(step, phase.residual_steps, device)
        if is_own(type(phase.attention)):
            self.prepared = phase.attention.prepare(self.grid, draws)
        else:
            with raises_in_one_line(phase.attention, "prepare"):
                self.prepared = phase.attention.prepare(self.grid, draws)

    def _draws(self, step: int, shared: int, device: torch.device) -> Draws:
        """Return the random numbers of a step; those of a group of steps are the same."""
        return Draws(self.call.config.seed, step // shared * shared, self.index, device)

    @property
    def turn(self) -> int:
        """Which of the layer's calls in this call of the denoiser is going on; a checkpoint repeats the first."""
        return 0 if is_recomputing() else self.calls

    def exact(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Call the original processor as diffusers does, with those of the other arguments that its signature names."""
        accepted = {name: value for name, value in others.items() if name in self.patched.accepted}
        return self.original(
            attn,
            hidden_states,
            encoder_hidden_states=encoder_hidden_states,
            attention_mask=attention_mask,
            **accepted,
        )

    def correct(self, approximated: Callable[[], Tensor], exact: Callable[[], Tensor]) -> Tensor:
        """Return an output with the error of the approximation taken off, by `residual_steps`.

        Args:
            approximated: computes the layer's output by the phase's approximation.
            exact: computes it by exact attention. It is called in the first of the steps that share a difference, where
                its result is returned; there also when a checkpoint computes the layer once more.
        """
        turn = self.turn
        known = self.added[turn] if turn in self.added else self.residuals.get(turn)
        if known is not None:
            output = approximated() + known
        else:
            output = exact()
            if self.call.shares:
                self.residuals[turn] = (output - approximated()).detach()
        if torch.is_grad_enabled():
            self.added[turn] = known
        if self.call.last:  # what decodes the latents needs the memory
            self.residuals.pop(turn, None)
        return output

    def matching(self, tokens: Tensor, ratio: float) -> Matching | None:
        """Return which tokens are merged at a ratio in this call (None: nothing is).

        The similarity is that of the block's input where it is known. It is computed once in a call, whatever the
        number of ratios, and not at all where the matching of another layer or step is reused.
        """
        if int(tokens.shape[1] * ratio) == 0:
            return None
        config, stride = self.call.config, self.phase.merge.stride
        reused = config.reuse_layers or config.reuse_steps > 1
        key = (self.grid if config.reuse_layers else self.index, self.turn, tokens.shape[0], ratio, stride)
        if reused and key in self.call.matchings:
            return self.call.matchings[key]
        if self.candidates is None:
            known = self.block_input
            metric = known if known is not None and known.shape == tokens.shape else tokens
            self.candidates = find_candidates(metric, self.grid.rows, self.grid.columns, stride, self.choice)
        candidates = self.candidates
        matching = None if candidates is None else match_candidates(candidates, ratio)
        if reused:
            self.call.matchings[key] = matching
        return matching


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
        """Apply the layer to hidden states `[batch, tokens, channels]` or `[batch, channels, height, width]`."""
        patched: PatchedLayer | None = getattr(attn, STATE, None)
        if patched is None:  # a layer that is not patched: what diffusers does by default
            return _DEFAULT()(attn, hidden_states, encoder_hidden_states, attention_mask, temb)  # type: ignore[no-any-return]
        patched.measure_grid(hidden_states)
        state = patched.state
        if state is None:  # outside of any call of the denoiser
            state = LayerState(patched, Call(patched.denoiser.config))
        phase = state.phase
        projections = state.layer.projections
        obstacle = projections.obstacle(state.grid, hidden_states, encoder_hidden_states, attention_mask)
        if obstacle or (phase.exact and state.call.config.attention_backend == "auto"):
            state.outcome = obstacle
            return state.exact(attn, hidden_states, encoder_hidden_states, attention_mask, temb=temb, **others)
        given = projections(attn, hidden_states, temb, state.fused)
        try:
            if phase.residual_steps > 1 and not phase.exact:
                output = state.correct(
                    lambda: approximate(given, state, phase, given.tokens),
                    lambda: approximate(given, state, EXACT, given.tokens),
                )
            else:
                output = approximate(given, state, phase, given.tokens)
        finally:  # also where memory ran out
            state.block_input = state.candidates = patched.recomputed = None
            state.calls += 1
        state.outcome = "done"
        return given.close(output)


def accepted_names(processor: Callable[..., Tensor]) -> frozenset[str]:
    """Return the names of the arguments that a processor names, as diffusers looks them up."""
    return frozenset(inspect.signature(processor.__call__).parameters)  # type: ignore[operator]


@functools.cache
def processor_for(accepted: frozenset[str]) -> type[ElfattProcessor]:
    """Return a class of ours whose signature names what an original's does: diffusers hands over no other arguments."""
    own = dict(inspect.signature(ElfattProcessor.__call__).parameters)
    more = sorted(accepted - own.keys() - {"args", "kwargs"})
    if not more:
        return ElfattProcessor

    class ElfattProcessorWithNames(ElfattProcessor):
        def __call__(self, *args: Any, **named: Any) -> Tensor:
            return ElfattProcessor.__call__(self, *args, **named)

    keywords = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in more]
    parameters = [parameter for name, parameter in own.items() if name != "others"]
    ElfattProcessorWithNames.__call__.__signature__ = inspect.Signature([*parameters, *keywords])  # type: ignore[attr-defined]
    ElfattProcessorWithNames.__name__ = ElfattProcessor.__name__
    return ElfattProcessorWithNames


def is_recomputing() -> bool:
    """Tell whether a checkpoint computes a layer once more, for its gradients."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class LayerInCall:
    """A layer in one call, as an attention sees it; see `methods.Layer`.

    Args:
        given: what the layer does around attention.
        state: of the layer.
        tokens: of the image, before merging.
    """

    def __init__(self, given: Projections, state: LayerState, tokens: Tensor) -> None:
        config = state.call.config
        self.kernel: dict[str, Any] = {"fp32_logits": config.fp32_logits, "backend": config.attention_backend}
        self.heads: tuple[int, ...] = ()  # and their size, once queries are projected
        self.dtype = tokens.dtype
        self._given = given
        self._state = state
        self._tokens = tokens

    def project(self, tokens: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v; k and v of the tokens at the places `keys` alone."""
        q, k, v = self._given.project(tokens, keys)
        self.heads, self.dtype = tuple(q.shape[2:]), q.dtype
        return q, k, v

    def queries(self, tokens: Tensor) -> Tensor:
        """Return q."""
        q = self._given.queries(tokens)
        self.heads, self.dtype = tuple(q.shape[2:]), q.dtype
        return q

    def merged(self, ratio: float) -> Tensor:
        """Return all tokens of the layer, merged at a ratio of the attention's own."""
        matching = self._state.matching(self._tokens, ratio)
        return self._tokens if matching is None else matching.merge(self._tokens)


def approximate(given: Projections, state: LayerState, phase: Phase, tokens: Tensor) -> Tensor:
    """Merge, order, attend, project, and put every token back in its place; `[batch, tokens, channels]`."""
    prepared = None if phase.exact else state.prepared
    order = None if prepared is None else prepared.order
    matching = state.matching(tokens, phase.merge.ratio)
    if matching is not None:
        if prepared is not None and prepared.sorts_merged:
            matching = matching.reordered(order_merged(order, matching.positions))
        merged = matching.merge(tokens)
    else:
        merged = tokens if order is None else tokens.index_select(1, order)
    mixed = _attend(LayerInCall(given, state, tokens), phase, merged, prepared)
    output = given.output(mixed)
    if matching is not None:
        return matching.unmerge(output)
    return output if prepared is None or prepared.inverse is None else output.index_select(1, prepared.inverse)


def _attend(layer: LayerInCall, phase: Phase, tokens: Tensor, prepared: Prepared | None) -> Tensor:
    """Attend; what an attention of somebody else's breaks is said in one line."""
    attention = phase.attention
    if is_own(type(attention)):
        return attention.attend(layer, tokens, prepared)
    with raises_in_one_line(attention, "attend"):
        mixed = attention.attend(layer, tokens, prepared)
    check_result(attention, mixed, (*tokens.shape[:2], *layer.heads), layer.dtype)
    return mixed
