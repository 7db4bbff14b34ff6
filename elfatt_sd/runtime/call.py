"""A call of a denoiser, and what a layer does in it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from elfatt_sd.attention.merging import Candidates, Matching, Split, find_candidates, match_candidates
from elfatt_sd.attention.ordering import NO_GRID
from elfatt_sd.config import PatchConfig
from elfatt_sd.devices import beneath_transforms
from elfatt_sd.families.base import Given, SelfAttention
from elfatt_sd.methods import Attention, Draws, Grid, Prepared, is_own
from elfatt_sd.methods.base import Ahead
from elfatt_sd.methods.conformance import check_result, raises_in_one_line
from elfatt_sd.phases import EXACT, Phase
from elfatt_sd.runtime.memory import (
    AT_ONCE,
    Memory,
    Residual,
    RunDraws,
    Shelf,
    add_difference,
    check_differences,
    kept_bytes,
    split_of,
)
from elfatt_sd.runtime.schedule import Position, Run
from elfatt_sd.runtime.surroundings import device_of, device_of_weights

if TYPE_CHECKING:
    from elfatt_sd.runtime.processor import PatchedLayer

if TYPE_CHECKING:
    from elfatt_sd.runtime.processor import PatchedLayer

_BYTES = 2  # of a value in a narrower dtype


class LayerCall:
    """What a patched layer knows in one call of the denoiser."""

    def __init__(self, patched: PatchedLayer, call: Call, grid: Grid = NO_GRID) -> None:
        self.patched = patched
        self.call = call
        self.grid = grid
        self.phase: Phase = EXACT
        self.block_input: Tensor | None = None  # of the transformer block, before its normalisation: ToMe's metric
        self.split: Split | None = None  # in merge destinations and what may be merged into them
        self.candidates: Candidates | None = None  # of this call
        self.prepared: Prepared | None = None  # by the phase's attention
        self.shares = False  # whether a difference measured in this call is of use in a later step
        self.calls = 0  # of the layer in this call of the denoiser: several, where that splits its input
        self.residuals: dict[int, Residual] = {}  # of each: exact minus approximated output; see `residual_steps`
        self.added: dict[int, Tensor | None] = {}  # of each: the difference that was added, None where it was measured
        self.room: Residual | None = None  # for that of the first, in compiled code
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
        return self.patched.fused

    @property
    def merges_nothing(self) -> bool:
        return self.phase.attention.exact and self.phase.merge.ratio > 0 and not self.phase.merge.merged(self.grid)

    def begin(self, phase: Phase, step: int, device: torch.device, ahead: Ahead | None = None) -> bool:
        """Set the phase, and prepare it on the grid: what is merged into what, and what its attention prepares."""
        self.phase = phase
        self.block_input = self.split = self.candidates = self.prepared = None
        self.calls, self.added = 0, {}
        if phase.exact:
            return True
        config, attention = self.call.config, phase.attention
        shared = phase.residual_steps
        if phase.matches:
            draws = Draws(config.seed, step, self.index, device, max(config.reuse_steps, shared), ahead)
            self.split = split_of(phase.merge, self.grid, draws if config.use_rand else None, device)
        if is_own(type(attention)):
            draws = Draws(config.seed, step, self.index, device, shared, ahead)
            self.prepared = attention.prepare(self.grid, draws)
            return not draws.anew
        with raises_in_one_line(attention, "prepare"):
            self.prepared = attention.prepare(self.grid, Draws(config.seed, step, self.index, device, shared))
        return False

    @property
    def turn(self) -> int:
        """Which of the layer's calls in this call of the denoiser is going on; a checkpoint repeats the first."""
        return self.calls if recomputed_part() is None else 0

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

    def correct(self, approximated: Callable[[], Tensor], exact: Callable[[slice], Tensor]) -> Tensor:
        """Return an output with the error of the approximation taken off, by `residual_steps`."""
        turn = self.turn
        kept = self.residuals.get(turn)
        known = self.added[turn] if turn in self.added else None if kept is None else kept.restore()
        if known is not None:
            output = known if self.phase.attention.empty else add_difference(approximated(), known)
        elif self.shares:
            output, difference = self._measured(approximated, exact)
            room = self.room if turn == 0 else None
            self.residuals[turn] = Residual.keep(difference.detach(), self.call.config.residuals, room)
        else:
            output = exact(slice(None))
        if self.call.repeats:
            self.added[turn] = known
        if self.call.last:  # what decodes the latents needs the memory
            self.residuals.pop(turn, None)
        return output

    def _measured(self, approximated: Callable[[], Tensor], exact: Callable[[slice], Tensor]) -> tuple[Tensor, Tensor]:
        if self.phase.attention.empty:
            output = exact(slice(None))
            return output, output
        output = approximated()
        rows, of_all = self.measured_rows, self.call.given.rows
        if rows == of_all or len(output) != of_all:  # some layers split their input
            whole = exact(slice(None))
            return whole, whole - output
        difference = exact(slice(-rows, None)) - output[-rows:]
        return add_difference(output, difference), difference

    @property
    def measured_rows(self) -> int:
        """The rows of a batch in which a difference is measured: those with the prompt, where guidance shares it."""
        return self.call.given.rows // (self.call.copies if self.phase.shares_guidance else 1)

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
        if self.candidates is None and self.split is not None:
            known = self.block_input
            metric = known if known is not None and known.shape == tokens.shape else tokens
            self.candidates = find_candidates(metric, self.split, config.attention_backend)
        matching = None if self.candidates is None else match_candidates(self.candidates, ratio)
        if reused:
            self.call.matchings[key] = matching
        return matching


def rounded(tensor: Tensor, phase: Phase) -> Tensor:
    wide = phase.attention_dtype is not None and tensor.element_size() > _BYTES
    return tensor.to(getattr(torch, phase.attention_dtype)) if wide else tensor  # type: ignore[arg-type]


def recomputed_part() -> tuple[int, int] | None:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or torch._C._current_graph_task_id() == -1:
        return None
    node = torch._C._current_autograd_node()
    return torch._C._current_graph_task_id(), -1 if node is None else int(node._sequence_nr())


def attend(attention: Attention, layer: Any, tokens: Tensor, prepared: Prepared | None) -> Tensor:
    """Attend; what an attention of somebody else's breaks is said in one line."""
    if is_own(type(attention)):
        return attention.attend(layer, tokens, prepared)
    with raises_in_one_line(attention, "attend"):
        mixed = attention.attend(layer, tokens, prepared)
    check_result(attention, mixed, (*tokens.shape[:2], *layer.heads), layer.dtype)
    return mixed


_NOTHING = Given(torch.empty(0, dtype=torch.float32, device="cpu"), 0, NO_GRID)
STATE = "elfatt_state"  # attribute of a patched attention module
KEPT_CALLS = 32  # of one step, that keep something for the next steps; it bounds the memory of calls without a schedule


class Call:
    """One call of a denoiser: what its layers share."""

    def __init__(self, config: PatchConfig, step: int = 0, phases: Mapping[int, Phase] | None = None) -> None:
        self.config = config  # the method
        self.phases = phases or {}  # of the layers in the call's step, by the layer's index
        self.step = step  # of the call, from which random draws are made
        self.copies = 1  # of the same latents among its rows
        self.place = 0  # among the calls of its step
        self.given = _NOTHING  # what the denoiser was given
        self.module: Any = None  # that is called: the denoiser, or its copy on one of several GPUs
        self.memory = Memory()  # what the run keeps
        self.matchings: dict[object, Matching | None] = {}  # of this call, and of its like in earlier steps
        # scheduled: whether the call is one of a run over a schedule
        # last: whether the run ends with this step
        # entered: whether the denoiser has come to its first convolution, or to its `forward`
        # repeats: whether a checkpoint may compute it, or a part of it, once more
        self.scheduled = self.last = self.entered = self.repeats = False
        self.states: dict[int, LayerCall] = {}  # of the patched layers, by the layer's index

    def restart(self) -> None:
        """Begin again, when the whole call is computed once more."""
        self.entered = False
        for state in self.states.values():
            state.calls = 0


class Denoiser:
    """What the patched layers of one UNet or ControlNet share."""

    def __init__(self, config: PatchConfig, pays: Callable[[LayerCall, Phase, Tensor], bool] | None = None) -> None:
        self.config = config
        self.pays = pays
        self.layers: list[PatchedLayer] = []
        self.grids: dict[tuple[int, Grid], Grid] = {}  # measured, by layer and grid of the input
        self.latest: Call | None = None  # of any thread
        self.bypassed = False  # whether it was said that layers are called outside of any call
        self._live: dict[int, Call] = {}  # by thread
        self._inputs: dict[Any, tuple[list[StorageWeakRef], Call]] = {}  # of what a checkpoint may compute once more
        self._repeated: dict[int, tuple[object, Call]] = {}  # by thread: what it computes once more, and of which call

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "latest": None, "_live": {}, "_inputs": {}, "_repeated": {}}

    @property
    def call(self) -> Call | None:
        """The call that goes on in this thread; None between calls."""
        return self._live.get(threading.get_ident())

    @property
    def repeated(self) -> Call | None:
        """The call of which a checkpoint of this thread computes a part once more."""
        part, call = self._repeated.get(threading.get_ident(), (None, None))
        return call if part is not None and part == recomputed_part() else None

    def begin(self, position: Position, run: Run, given: Given) -> None:
        """Prepare the layers for a call: phase, grids, and what is drawn at random.

        A step may take several calls: with the prompt and without, or one for each view of a panorama. What a call
        keeps is for the calls of later steps that have the same place among those of their step, and the same shape.
        """
        config, step, sample = self.config, position.step, given.sample
        phases = self._phases(step, position.steps)
        call = Call(config, step, phases)
        shape = tuple(map(int, sample.shape))
        call.memory = memory = run.kept.setdefault(self, call.memory)
        place = memory.place(step, shape)
        call.place = place[0]
        call.copies, first = memory.same_latents(place, sample) if self.config.shares_guidance else (1, place)
        call.scheduled = position.scheduled
        kept = position.scheduled and place[0] < KEPT_CALLS
        call.matchings = memory.matchings.take(step // config.reuse_steps, place, kept and config.reuse_steps > 1)
        call.last = 1 < position.steps == step + 1
        call.given = replace(given, timestep=None)  # a view of the schedule, which would keep its run
        ahead = self._ahead(call, position, run)
        if ahead is not None:
            ahead.fill(step)
        for layer in self.layers:
            state = call.states[layer.index] = LayerCall(layer, call)
            if ahead is None or not ahead.give(state):
                self._begin(state, ahead)
            phase = phases[layer.index]
            if phase.residual_steps > 1 or layer.index in memory.residuals:  # what an earlier phase kept is let go
                state.shares = kept and layer.config.shares_difference(step, position.steps)
                group = step // phase.residual_steps, phase
                where = first if phase.shares_guidance else place
                shelf = memory.residuals.setdefault(layer.index, Shelf())
                state.residuals = shelf.take(group, where, kept and phase.residual_steps > 1)
                state.room = memory.room(state, place) if given.compiled and state.shares else None
        for other in run.kept.values():
            other.let_go(step)
        if kept and place not in memory.needs:
            memory.needs[place] = self._needed(call, position, 0 if first != place else given.rows // call.copies)
            check_differences(run, config, sample.device)
        self.enter(call)

    def _phases(self, step: int, steps: int) -> dict[int, Phase]:
        if not self.config.per_layer:
            return dict.fromkeys((layer.index for layer in self.layers), self.config.phase_at(step, steps))
        return {layer.index: layer.config.phase_at(step, steps) for layer in self.layers}

    def _begin(self, state: LayerCall, ahead: RunDraws | None) -> None:
        """Prepare a layer for a call."""
        layer, call = state.patched, state.call
        given = call.given
        state.grid = self.grids.get((layer.index, given.grid)) or layer.layer.grid(given.grid)
        own = call.phases[layer.index] if state.grid.tokens else EXACT
        if self.pays is not None and not own.exact and not self.pays(state, own, given.sample):
            own = EXACT
        device = device_of(layer.parts, given.sample.device) if ahead is None else ahead.device_of(layer.index)
        if state.begin(own, call.step, device, ahead) and ahead is not None and self.pays is None:
            ahead.keep(state)

    def _ahead(self, call: Call, position: Position, run: Run) -> RunDraws | None:
        given, known = call.given, call.memory.ahead
        if not (position.scheduled and self.layers) or run.schedule is None or torch.is_grad_enabled():
            return None
        where = device_of_weights(self.layers[0].parts, given.sample.device)
        key = (tuple(map(id, call.phases.values())), given.grid, given.sample.device, where, len(self.grids))
        if key not in known:
            of_phase = {other: kept for other, kept in known.items() if other[0] == key[0]}
            known.clear()
            known.update(of_phase)
            known[key] = self._asked_ahead(call, position)
        return known[key]

    def _asked_ahead(self, call: Call, position: Position) -> RunDraws | None:
        """Let the layers ask for what they draw in all steps of a call's phase."""
        devices = {layer.index: device_of(layer.parts, call.given.sample.device) for layer in self.layers}
        if all(device.type in AT_ONCE for device in devices.values()):
            return None
        later = (self._phases(step, position.steps) for step in range(call.step, position.steps))
        steps = len(list(itertools.takewhile(lambda phases: phases == call.phases, later)))
        ahead = RunDraws(devices, call.step + steps)
        for layer in self.layers:
            self._begin(LayerCall(layer, call), ahead)
        ahead.allocate()
        return ahead

    def _needed(self, call: Call, position: Position, guided: int) -> float:
        sample, rest = call.given.sample, (position.step, position.steps)
        sharing = [layer for layer in self.layers if layer.config.shares_any(*rest)]
        rows = [guided if layer.config.shares_guidance else call.given.rows for layer in sharing]
        sizes = [(layer.layer.grid(call.given.grid).tokens, layer.layer.channels) for layer in sharing]
        dtype = sample.dtype if sample.dtype.is_floating_point else torch.float32
        of_all = [(count * tokens, channels) for count, (tokens, channels) in zip(rows, sizes, strict=True)]
        return kept_bytes(of_all, 1, dtype, self.config.residuals)

    def enter(self, call: Call) -> None:
        """Let a call be the one that goes on in this thread."""
        self._live[threading.get_ident()] = self.latest = call
        for layer in self.layers:
            layer.latest = call.states[layer.index]

    def end(self) -> Call | None:
        """End this thread's call and return it; compiled layers forget it, but for what a checkpoint may repeat."""
        call = self._live.pop(threading.get_ident(), None)
        if call is not None and not call.repeats:
            for layer in self.layers:
                layer.latest = None
        return call

    @property
    def threads(self) -> int:
        """Number of threads that are in a call."""
        return len(self._live)

    def before_part(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the modules around the layers: a checkpoint hands a part what the call handed it."""
        if torch.compiler.is_compiling():
            return
        part = recomputed_part()
        if self.call is None and part is not None and (known := self.recall(args, kwargs)) is not None:
            self._repeated[threading.get_ident()] = part, known
        call = self.call or self.repeated
        if call is not None and call.repeats:
            self.remember(call, args, kwargs)  # also of a part within a part that is computed once more

    def remember(self, call: Call, *inputs: Any) -> None:
        """Keep a call for `recall`, as long as the memory of these inputs of it, or of a part of it, is in use."""
        tensors = [beneath_transforms(each) for each in leaves(inputs) if isinstance(each, Tensor)]
        self._inputs[_key(inputs)] = [StorageWeakRef(each.untyped_storage()) for each in tensors], call  # type: ignore[no-untyped-call]

    def recall(self, *inputs: Any) -> Call | None:
        refs, call = self._inputs.get(_key(inputs), ([], None))
        return None if any(ref.expired() for ref in refs) else call  # type: ignore[no-untyped-call]

    def forget_expired(self) -> None:
        """Let go of the calls that no checkpoint can compute once more."""
        self._repeated.pop(threading.get_ident(), None)
        for key, (refs, _) in list(self._inputs.items()):
            if any(ref.expired() for ref in refs):  # type: ignore[no-untyped-call]
                self._inputs.pop(key, None)  # other threads do the same


def leaves(values: Any) -> Iterator[Any]:
    if not isinstance(values, list | tuple | dict):
        yield values
        return
    for value in values.values() if isinstance(values, dict) else values:
        yield from leaves(value)


def _key(inputs: Any) -> tuple[Any, ...]:
    return tuple(map(_key_of, leaves(inputs)))


def _key_of(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value if isinstance(value, int | float | str) else None
    own = beneath_transforms(value)
    return own.untyped_storage().data_ptr(), int(own.storage_offset()), tuple(own.shape)
