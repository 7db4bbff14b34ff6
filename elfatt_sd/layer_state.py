"""What a patched layer knows and does in one call of its denoiser."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from elfatt_sd.ahead import split_of
from elfatt_sd.families.base import SelfAttention
from elfatt_sd.merging import Candidates, Matching, Split, find_candidates, match_candidates
from elfatt_sd.methods import Attention, Draws, Grid, Prepared, is_own
from elfatt_sd.methods.base import Ahead
from elfatt_sd.methods.conformance import check_result, raises_in_one_line
from elfatt_sd.phases import EXACT, Phase
from elfatt_sd.residuals import Residual, add_difference
from elfatt_sd.tiling import NO_GRID

if TYPE_CHECKING:
    from elfatt_sd.calls import Call
    from elfatt_sd.processor import PatchedLayer

_BYTES = 2  # of a value in a narrower dtype


class LayerState:
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
