"""A call of a denoiser, and what a layer does in it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from elfatt_sd.attention.merging import Candidates, Matching, Split, find_candidates, match_candidates
from elfatt_sd.attention.ordering import NO_GRID
from elfatt_sd.config import PatchConfig
from elfatt_sd.families.base import Given
from elfatt_sd.families.cuts import Taking
from elfatt_sd.methods import Attention, Draws, Grid, Prepared, is_own
from elfatt_sd.methods.conformance import check_result, raises_in_one_line
from elfatt_sd.phases import EXACT, Phase
from elfatt_sd.runtime.layer import PatchedLayer, device_of, recomputed_part
from elfatt_sd.runtime.memory import Memory, Residual, RunDraws, add_difference, split_of

_BYTES = 2  # of a value in a narrower dtype
_NOTHING = Given(torch.empty(0, dtype=torch.float32, device="cpu"), 0, NO_GRID)


class Call:
    """One call of a denoiser: what its layers share."""  # no dataclass, nor is `Memory`: traced code makes them

    def __init__(self, config: PatchConfig, step: int = 0, phases: Mapping[int, Phase] | None = None) -> None:
        self.config = config  # the method
        self.phases = phases or {}  # of the layers in the call's step, by the layer's index
        self.step = step  # of the call, from which random draws are made
        self.copies = 1  # of the same latents among its rows
        self.place: tuple[int, ...] = (0,)  # among the calls of its step, and its shape
        self.takings: dict[str, Taking] = {}  # what it takes over from earlier steps, or keeps for later ones, by cut
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


class LayerCall:
    """What a patched layer knows in one call of the denoiser."""

    def __init__(self, patched: PatchedLayer, call: Call, grid: Grid = NO_GRID) -> None:
        self.patched = patched
        self.layer, self.index = patched.layer, patched.index
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
        self.buffer: Residual | None = None  # for that of the first, in compiled code
        self.outcome = ""  # why the layer was not approximated in this call; `done` if it was

    def begin(self, phase: Phase, step: int, device: torch.device, ahead: RunDraws | None = None) -> bool:
        """Prepare a phase on the grid; tell whether what is prepared holds for other steps of the phase as well."""
        self.phase = phase
        self.block_input = self.split = self.candidates = self.prepared = None
        self.calls, self.added = 0, {}
        if phase.exact:
            return True
        config, attention, shared = self.call.config, phase.attention, phase.residual_steps
        if phase.matches:
            draws = Draws(config.seed, step, self.index, device, max(config.reuse_steps, shared), ahead)
            self.split = split_of(phase.merge, self.grid, draws if config.use_rand else None, device)
        own = is_own(type(attention))
        draws = Draws(config.seed, step, self.index, device, shared, ahead if own else None)
        with contextlib.nullcontext() if own else raises_in_one_line(attention, "prepare"):
            self.prepared = attention.prepare(self.grid, draws)
        return own and not draws.anew

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
        return self.patched.original(
            attn, hidden_states, encoder_hidden_states=encoder_hidden_states, attention_mask=attention_mask, **accepted
        )

    def correct(self, approximated: Callable[[], Tensor], exact: Callable[[slice], Tensor]) -> Tensor:
        """Return an output with the error of the approximation taken off, by `residual_steps`."""
        turn = self.turn
        kept = self.residuals.get(turn)
        known = self.added[turn] if turn in self.added else None if kept is None else kept.restore()
        if known is not None:
            output = known if self.phase.attention.empty else add_difference(approximated(), known)
        elif not self.shares:
            output = exact(slice(None))
        else:
            rows, of_all = self.measured_rows, self.call.given.rows
            if self.phase.attention.empty:
                output = difference = exact(slice(None))
            else:
                output = approximated()
                if rows == of_all or len(output) != of_all:  # some layers split their input
                    difference = (whole := exact(slice(None))) - output
                    output = whole
                else:
                    difference = exact(slice(-rows, None)) - output[-rows:]
                    output = add_difference(output, difference)
            buffer = self.buffer if turn == 0 else None
            self.residuals[turn] = Residual.keep(difference.detach(), self.call.config.residuals, buffer)
        if self.call.repeats:
            self.added[turn] = known
        if self.call.last:  # what decodes the latents needs the memory
            self.residuals.pop(turn, None)
        return output

    @property
    def measured_rows(self) -> int:
        """The rows of a batch in which a difference is measured: those with the prompt, where guidance shares it."""
        return self.call.given.rows // (self.call.copies if self.phase.shares_guidance else 1)

    def buffer_at(self, place: tuple[int, ...]) -> Residual | None:
        """Return the memory for the layer's difference in compiled code, the same in every group of steps."""
        layer, given, buffers = self.layer, self.call.given, self.call.memory.buffers
        if self.phase.exact or torch.is_grad_enabled():
            return None
        key = place, self.index, self.grid, self.measured_rows
        if key not in buffers:
            device = device_of(self.patched.parts, given.sample.device)
            of_heads = layer.joint and not self.phase.merge.ratio  # what is corrected is not projected yet
            sizes = (layer.heads, layer.channels // layer.heads) if of_heads else (layer.channels,)
            shape = (self.measured_rows, self.grid.tokens, *sizes)
            buffers[key] = Residual.buffer(shape, given.sample.dtype, device, self.call.config.residuals)
        return buffers[key]

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
            self.candidates = find_candidates(metric, self.split)
        matching = None if self.candidates is None else match_candidates(self.candidates, ratio)
        if reused:
            self.call.matchings[key] = matching
        return matching


@dataclass(eq=False)
class Repeats:
    """Calls that a checkpoint may compute once more, by what they and their parts were given."""

    _known: dict[Any, tuple[list[StorageWeakRef], Call]] = field(default_factory=dict)
    # by thread: what it computes once more, and of which call
    _parts: dict[int, tuple[object, Call]] = field(default_factory=dict)

    def call(self, *inputs: Any) -> Call | None:
        """Return the call of which this thread computes a part once more, by what the part was given at its start."""
        now, thread = recomputed_part(), threading.get_ident()
        if now is None:
            return None
        part, call = self._parts.get(thread, (None, None))
        if inputs and (begun := self.recall(*inputs)) is not None:
            part, call = self._parts[thread] = now, begun
        return call if part == now else None

    def remember(self, call: Call, *inputs: Any) -> None:
        """Keep a call for `recall`, as long as the memory of these inputs of it, or of a part of it, is in use."""
        tensors = [each for each in tree_leaves(inputs) if isinstance(each, Tensor)]
        self._known[_key(inputs)] = [StorageWeakRef(each.untyped_storage()) for each in tensors], call  # type: ignore[no-untyped-call]

    def recall(self, *inputs: Any) -> Call | None:
        refs, call = self._known.get(_key(inputs), ([], None))
        return None if any(ref.expired() for ref in refs) else call  # type: ignore[no-untyped-call]

    def forget_expired(self) -> None:
        self._parts.pop(threading.get_ident(), None)
        for key, (refs, _) in list(self._known.items()):
            if any(ref.expired() for ref in refs):  # type: ignore[no-untyped-call]
                self._known.pop(key, None)  # other threads do the same


def _key(inputs: Any) -> tuple[Any, ...]:
    found = list[Any]()
    for value in tree_leaves(inputs):
        if isinstance(value, Tensor):
            found.append((value.untyped_storage().data_ptr(), int(value.storage_offset()), tuple(value.shape)))
        else:
            found.append(value if isinstance(value, int | float | str) else None)
    return tuple(found)


def image_of(output: Any, state: LayerCall) -> Tensor:
    given: Tensor = output[0] if isinstance(output, tuple) else output
    given = given.flatten(2).transpose(1, 2) if given.ndim == 4 else given
    before = state.call.given.before if given.shape[1] > state.grid.tokens else 0
    return given[:, before : before + state.grid.tokens].detach()


def rounded(tensor: Tensor, phase: Phase) -> Tensor:
    wide = phase.attention_dtype is not None and tensor.element_size() > _BYTES
    return tensor.to(getattr(torch, phase.attention_dtype)) if wide else tensor  # type: ignore[arg-type]


def attend(attention: Attention, layer: Any, tokens: Tensor, prepared: Prepared | None) -> Tensor:
    """Attend; what an attention of somebody else's breaks is said in one line."""
    if is_own(type(attention)):
        return attention.attend(layer, tokens, prepared)
    with raises_in_one_line(attention, "attend"):
        mixed = attention.attend(layer, tokens, prepared)
    check_result(attention, mixed, (*tokens.shape[:2], *layer.heads), layer.dtype)
    return mixed
